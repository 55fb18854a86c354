"""The KL penalty: its bias under old tokens, by enumeration, and its form in the reward, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from app.maths.objective import LOSS_FORMS, LossConfig, policy_objective, reward_kl_penalty

OLD = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64).log()
REF = torch.tensor([0.1, 0.3, 0.4, 0.2], dtype=torch.float64).log()
LOGITS = torch.tensor([0.3, -0.8, 0.1, 1.2], dtype=torch.float64)


def expectation(logits: Tensor, old: Tensor | None = None, weight_kl: bool = True, **settings) -> Tensor:
    """The KL part of the loss over every symbol, each as likely as `OLD` makes it; advantages are 0."""
    new = logits.log_softmax(0)[:, None]
    old = OLD[:, None] if old is None else old
    share = OLD.exp()[:, None]
    config = LossConfig(**{"beta": 1.0, "max_completion_length": 1, **settings})
    parts = policy_objective(
        new, old, torch.ones(4, 1, dtype=torch.bool), torch.zeros(4), is_weights=share, keep_mask=None,
        ref_logprobs=REF[:, None], config=config, total_tokens=1, total_rows=1, weight_kl=weight_kl,
    )  # fmt: skip
    return parts.loss


def exact(logits: Tensor) -> Tensor:
    new = logits.log_softmax(0)
    return (new.exp() * (new - REF)).sum()


def value_and_gradient(function, logits: Tensor = LOGITS, **options) -> tuple[float, Tensor]:
    logits = logits.clone().requires_grad_()
    value = function(logits, **options)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.item(), gradient


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("loss_type", [name for name in LOSS_FORMS if name != "bnpo"])  # divides by its own tokens
def test_bias_corrected_kl_is_kl_in_value_and_gradient(estimator, loss_type) -> None:
    value, gradient = value_and_gradient(exact)
    settings = {"kl_estimator": estimator, "loss_type": loss_type}
    found, slope = value_and_gradient(expectation, use_bias_correction_kl=True, **settings)
    assert found == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(slope, gradient, rtol=1e-12, atol=1e-15)
    biased, biased_slope = value_and_gradient(expectation, **settings)
    assert abs(biased - value) > 0.01
    assert not torch.allclose(biased_slope, gradient, rtol=0.1)


def test_on_policy_k1_has_a_gradient_with_the_correction_only() -> None:
    """old = new: E[grad k1] = 0, the penalty does nothing; the corrected one has the gradient of KL."""
    on_policy = {"logits": OLD, "old": OLD[:, None], "kl_estimator": "k1"}
    _, nothing = value_and_gradient(expectation, **on_policy)
    torch.testing.assert_close(nothing, torch.zeros_like(nothing), rtol=0, atol=1e-15)
    _, slope = value_and_gradient(expectation, use_bias_correction_kl=True, **on_policy)
    torch.testing.assert_close(slope, value_and_gradient(exact, OLD)[1], rtol=1e-12, atol=1e-15)


def test_bias_correction_uses_the_ratio_of_the_token_for_gspo_too() -> None:
    new = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    old = torch.tensor([[-1.5, -1.2]], dtype=torch.float64)
    ref = torch.tensor([[-0.8, -2.5]], dtype=torch.float64)
    parts = policy_objective(
        new, old, torch.ones(1, 2, dtype=torch.bool), torch.zeros(1), is_weights=None, keep_mask=None,
        ref_logprobs=ref, total_tokens=2, total_rows=1,
        config=LossConfig(loss_type="gspo", beta=3.0, use_bias_correction_kl=True),
    )  # fmt: skip
    k3 = [math.exp(0.2) - 1 - 0.2, math.exp(-0.5) - 1 + 0.5]
    assert parts.kl_loss.item() == pytest.approx(3 * (math.exp(0.5) * k3[0] + math.exp(-0.8) * k3[1]) / 2)
    assert parts.ref_kl_sum.item() == pytest.approx(sum(k3)), "the metric stays uncorrected"


@pytest.mark.parametrize(
    ("estimator", "row"),
    [
        (None, (-1.0 + 1.4) + (-2.0 + 1.5)),
        ("k1", (-1.0 + 1.4) + (-2.0 + 1.5)),
        ("k2", 0.4**2 / 2 + 0.5**2 / 2),
        ("k3", (math.exp(-0.4) - 1 + 0.4) + (math.exp(0.5) - 1 - 0.5)),
    ],
)
def test_penalty_in_the_reward_is_the_sum_over_the_row(estimator, row) -> None:
    old = torch.tensor([[-1.0, -2.0, math.nan], [math.inf] * 3], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.4, -1.5, -math.inf], [math.nan] * 3], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False] * 3])
    penalty = reward_kl_penalty(old, ref, mask, LossConfig(beta=0.5, kl_in_reward=True, kl_estimator=estimator))
    assert penalty.tolist() == [pytest.approx(0.5 * row), 0.0]
    assert not penalty.requires_grad


def test_penalty_in_the_reward_estimates_the_kl_of_the_row() -> None:
    """Over every symbol that old sampled, the mean penalty is beta * KL(old || reference)."""
    config = LossConfig(beta=0.3, kl_in_reward=True)
    penalty = reward_kl_penalty(OLD[:, None], REF[:, None], torch.ones(4, 1, dtype=torch.bool), config)
    expected = 0.3 * sum(p * math.log(p / q) for p, q in zip([0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.4, 0.2], strict=True))
    assert (OLD.exp() * penalty).sum().item() == pytest.approx(expected)
