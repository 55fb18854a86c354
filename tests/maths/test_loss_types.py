"""Each loss type against its formula written out token by token, in value and gradient.

The loops follow what TRL documents for its `loss_type`s; gspo is its 'grpo' with sequence-level importance sampling.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from app.maths.objective import LOSS_FORMS, LossConfig, policy_objective

LENGTHS = [4, 2, 3, 1, 2]
MASK = torch.arange(4)[None, :] < torch.tensor(LENGTHS)[:, None]
ADVANTAGES = torch.tensor([1.3, -0.7, -1.9, 0.4, -1.1], dtype=torch.float64)
LOG_RATIO = torch.tensor(  # new - old; 0.24 lies between grpo's and dapo's bound, 1.8 above cispo's
    [
        [0.5, -0.4, 0.1, 0.24],
        [1.8, -0.3, 0.0, 0.0],
        [0.02, -0.0502, 0.03, 0.0],
        [-0.3, 0.0, 0.0, 0.0],
        [-0.6, 0.1, 0.0, 0.0],
    ],
    dtype=torch.float64,
)
_generator = torch.Generator().manual_seed(7)
NEW = -3 * torch.rand(5, 4, generator=_generator, dtype=torch.float64)
OLD = NEW - LOG_RATIO
REF = NEW + 0.5 * torch.randn(5, 4, generator=_generator, dtype=torch.float64)
WEIGHTS = 2 * torch.rand(5, 4, generator=_generator, dtype=torch.float64)
BETA = 0.05
MICRO_BATCHES = [[0, 1], [2, 3, 4]]  # rows
LIMIT = 6  # max_completion_length


def clip(value: Tensor, low: float, high: float) -> Tensor:
    """A scalar between two bounds, without gradient outside."""
    return value if low <= value.item() <= high else value.new_tensor(low if value.item() < low else high)


def pessimist(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    free, clipped = ratio * a, clip(ratio, 1 - low, 1 + high) * a
    return -(free if free.item() <= clipped.item() else clipped)


def token_loss(loss_type: str, new: Tensor, row: int, t: int) -> Tensor:
    """The policy term of one token, weighted."""
    a = ADVANTAGES[row].item()
    difference = [new[row, k] - OLD[row, k] for k in range(LENGTHS[row])]
    ratio = difference[t].exp()
    if loss_type in ("grpo", "bnpo", "dr_grpo"):
        loss = pessimist(ratio, a, 0.2, 0.2)
    elif loss_type == "dapo":
        loss = pessimist(ratio, a, 0.2, 0.28)
    elif loss_type == "gspo":
        loss = pessimist((sum(difference) / LENGTHS[row]).exp(), a, 3e-4, 4e-4)
    elif loss_type == "gspo-token":
        value = math.exp(sum(d.item() for d in difference) / LENGTHS[row])
        loss = pessimist(value * (new[row, t] - new[row, t].detach()).exp(), a, 3e-4, 4e-4)
    elif loss_type == "cispo":
        loss = -min(ratio.item(), 5.0) * a * new[row, t]
    elif loss_type == "sapo":
        tau = 1.0 if a > 0 else 1.05
        loss = -a * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    else:
        loss = -a * new[row, t]
    return loss * WEIGHTS[row, t].item()


def expected_loss(loss_type: str, new: Tensor) -> Tensor:
    """Policy and KL terms, aggregated over the step's micro-batches as the loss type does."""

    def term(row: int, t: int) -> Tensor:
        difference = REF[row, t] - new[row, t]
        kl = difference.exp() - difference - 1
        return token_loss(loss_type, new, row, t) + BETA * WEIGHTS[row, t].item() * kl

    sums = [sum(term(row, t) for t in range(length)) for row, length in enumerate(LENGTHS)]
    if loss_type in ("grpo", "sapo", "gspo", "gspo-token"):
        return sum(s / length for s, length in zip(sums, LENGTHS, strict=True)) / 5
    if loss_type == "bnpo":
        means = [sum(sums[row] for row in rows) / sum(LENGTHS[row] for row in rows) for rows in MICRO_BATCHES]
        return sum(means) / 2
    if loss_type == "dr_grpo":
        return sum(sums) / (5 * LIMIT)
    return sum(sums) / sum(LENGTHS)


@pytest.mark.parametrize("loss_type", LOSS_FORMS)
def test_value_and_gradient_equal_the_loop(loss_type) -> None:
    new = NEW.clone().requires_grad_()
    expected = expected_loss(loss_type, new)
    (expected_gradient,) = torch.autograd.grad(expected, new)

    config = LossConfig(loss_type=loss_type, beta=BETA, max_completion_length=LIMIT)
    parts = [
        policy_objective(
            new[rows], OLD[rows], MASK[rows], ADVANTAGES[rows], is_weights=WEIGHTS[rows], keep_mask=None,
            ref_logprobs=REF[rows], config=config, total_tokens=12, total_rows=5, micro_batches=2,
        )
        for rows in MICRO_BATCHES
    ]  # fmt: skip
    loss = sum(part.loss for part in parts)
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-14)


def test_the_rows_reach_every_branch() -> None:
    """Otherwise the comparison above would prove little: each side of a clip, with both signs of the advantage."""
    row_means = [sum(row[:length]) / length for row, length in zip(LOG_RATIO.tolist(), LENGTHS, strict=True)]
    for log_ratio, margin in ((torch.where(MASK, LOG_RATIO, 0.0), 0.25), (torch.tensor(row_means)[:, None], 1e-3)):
        for outside in (log_ratio < -margin, log_ratio > margin):
            for sign in (ADVANTAGES > 0, ADVANTAGES < 0):
                assert (outside & sign[:, None]).any()
        assert ((log_ratio.abs() < margin / 4) & MASK).any()
