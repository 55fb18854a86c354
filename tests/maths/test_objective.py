from __future__ import annotations

import itertools
import math

import pytest
import torch

from app.maths.correction import CorrectionConfig, correct
from app.maths.objective import LossConfig, LossParts, policy_objective

NEW = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.1, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.1, -1.9, -0.5], [-0.6, -1.2, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
REF = torch.tensor([[-1.2, -1.6, -0.9], [-0.7, -1.5, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = NEW < 9
ADVANTAGES = torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64)
WEIGHTS = torch.tensor([[2.0, 0.5, 1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
KEEP = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
AGGREGATIONS = ["token_mean", "row_mean", "constant_length"]
LOSSES = ["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce"]


def objective(new: torch.Tensor, rows: slice = slice(None), **changes) -> LossParts:
    """The objective over `rows` of the step above; `changes` are arguments, or fields of LossConfig."""
    arguments = {"is_weights": WEIGHTS, "keep_mask": KEEP, "ref_logprobs": REF}
    settings = {"loss": "ppo_clip", "beta": 0.1, "max_completion_length": 4}
    options = {"weight_kl": True, "total_tokens": 5, "total_rows": 2, "old": OLD}
    for key, value in changes.items():
        next(group for group in (arguments, options, settings) if key in group or group is settings)[key] = value
    tensors = {key: None if tensor is None else tensor[rows] for key, tensor in arguments.items()}
    old = options.pop("old")[rows]
    config = LossConfig(**settings)
    return policy_objective(new[rows], old, MASK[rows], ADVANTAGES[rows], **tensors, config=config, **options)


def loop(aggregation: str, weight_kl: bool) -> tuple[float, float]:
    """Policy and KL part of the step above, token by token."""
    policy = kl = 0.0
    for row, length in ((0, 3), (1, 2)):
        for token in range(length):
            if not KEEP[row, token]:
                continue
            share = {"token_mean": 1 / 5, "row_mean": 1 / length / 2, "constant_length": 1 / (2 * 4)}[aggregation]
            new, old, ref = (tensor[row, token].item() for tensor in (NEW, OLD, REF))
            a, w, r = ADVANTAGES[row].item(), WEIGHTS[row, token].item(), math.exp(new - old)
            policy += -min(r * a, min(max(r, 0.8), 1.2) * a) * w * share
            kl += 0.1 * (math.exp(ref - new) - 1 - (ref - new)) * (w if weight_kl else 1.0) * share
    return policy, kl


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("weight_kl", [True, False])
def test_value_equals_a_loop(aggregation, weight_kl) -> None:
    parts = objective(NEW, aggregation=aggregation, weight_kl=weight_kl)
    policy, kl = loop(aggregation, weight_kl)
    assert parts.policy_loss.item() == pytest.approx(policy, rel=1e-12)
    assert parts.kl_loss.item() == pytest.approx(kl, rel=1e-12)
    assert parts.loss.item() == pytest.approx(policy + kl, rel=1e-12)


def test_sums_for_metrics_count_valid_tokens_before_rejection() -> None:
    parts = objective(NEW, weight_kl=False)
    valid = [(row, token) for row, token in itertools.product(range(3), range(3)) if MASK[row, token]]
    drift = [(NEW[i] - OLD[i]).item() for i in valid]
    distance = [(REF[i] - NEW[i]).item() for i in valid]
    assert parts.token_count.item() == 5
    assert parts.approx_kl_sum.item() == pytest.approx(sum(math.exp(x) - 1 - x for x in drift))
    assert parts.ref_kl_sum.item() == pytest.approx(sum(math.exp(x) - 1 - x for x in distance))
    assert not parts.approx_kl_sum.requires_grad
    assert not parts.ref_kl_sum.requires_grad


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.4), ("k2", 0.08), ("k3", math.exp(-0.4) - 0.6)])
def test_the_kl_estimators_go_from_new_to_reference(estimator, expected) -> None:
    new, ref = torch.tensor([[-0.5]]), torch.tensor([[-0.9]])
    config = LossConfig(beta=2.0, kl_estimator=estimator)
    mask = torch.tensor([[True]])
    parts = policy_objective(
        new, new, mask, torch.zeros(1), is_weights=None, keep_mask=None, ref_logprobs=ref, config=config,
        total_tokens=1, total_rows=1,
    )  # fmt: skip
    assert parts.loss.item() == pytest.approx(2 * expected, rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_sum_to_the_whole_in_value_and_gradient(loss, aggregation) -> None:
    new = NEW.clone().requires_grad_()
    whole = objective(new, loss=loss, aggregation=aggregation)
    (expected,) = torch.autograd.grad(whole.loss, new)
    parts = [objective(new, slice(row, row + 1), loss=loss, aggregation=aggregation) for row in range(3)]
    total = sum(part.loss for part in parts)
    (actual,) = torch.autograd.grad(total, new)
    torch.testing.assert_close(total, whole.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_single_update_has_the_gradient_of_weighted_reinforce(loss) -> None:
    new = NEW.clone().requires_grad_()
    parts = objective(new, old=new.detach(), loss=loss, beta=0.0, keep_mask=None)
    parts.loss.backward()
    weights = WEIGHTS if loss != "gspo" else torch.where(MASK, WEIGHTS.sum(1, True) / MASK.sum(1, True).clamp(min=1), 0)
    torch.testing.assert_close(new.grad, -weights * ADVANTAGES[:, None] / 5, rtol=1e-12, atol=1e-15)
    assert parts.approx_kl_sum.item() == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_dropped_tokens_have_no_gradient_but_stay_in_the_denominator(loss) -> None:
    new = NEW.clone().requires_grad_()
    objective(new, loss=loss, is_weights=None).loss.backward()
    assert new.grad is not None
    assert (new.grad[~KEEP] == 0).all()
    assert (new.grad[KEEP] != 0).any()
    kept_value = objective(NEW, loss="reinforce", beta=0.0, is_weights=None).loss.item()
    by_hand = -(1.5 * (-1.0 - 0.5) - 0.5 * (-0.7 - 1.1)) / 5
    assert kept_value == pytest.approx(by_hand)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_everything_dropped_is_zero_with_a_gradient(loss, aggregation) -> None:
    new = NEW.clone().requires_grad_()
    parts = objective(new, loss=loss, aggregation=aggregation, keep_mask=torch.zeros_like(KEEP))
    parts.loss.backward()
    assert parts.loss.item() == 0
    assert new.grad is not None
    assert (new.grad == 0).all()


def test_clip_masks_leave_dropped_tokens_out() -> None:
    old = OLD - 1.0  # every ratio is above 1.2
    everything = objective(NEW, old=old, keep_mask=None).clipped_high
    assert everything.int().tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]  # the second advantage is below 0
    assert objective(NEW, old=old).clipped_high.int().tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_sequence_weights_make_the_policy_gradient_unbiased() -> None:
    """Over every row of two tokens from three symbols, weighed by its rollout probability."""
    rows = torch.tensor(list(itertools.product(range(3), repeat=2)))
    mask = torch.ones_like(rows, dtype=torch.bool)
    rollout = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logits = torch.tensor([0.1, -0.4, 0.6], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)[rows].prod(dim=1)
    new = logits.log_softmax(0)[rows]
    (expected,) = torch.autograd.grad(-(new.sum(dim=1).exp() * rewards).sum(), logits, retain_graph=True)

    config = CorrectionConfig(level="sequence", upper=1e6)
    correction = correct(new.detach(), rollout[rows], mask, config)
    parts = policy_objective(
        new, new.detach(), mask, rollout[rows].sum(dim=1).exp() * rewards, is_weights=correction.is_weights,
        keep_mask=correction.mask, config=LossConfig(aggregation="constant_length", max_completion_length=1),
        total_tokens=1, total_rows=1,
    )  # fmt: skip
    (actual,) = torch.autograd.grad(parts.loss, logits)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss\.beta=0\.1 needs ref_logprobs"):
        objective(NEW, ref_logprobs=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "ppo"}, "loss='ppo' is unknown; choose one of ppo_clip, gspo"),
        ({"aggregation": "mean"}, "choose one of token_mean, row_mean, constant_length"),
        ({"kl_estimator": "k4"}, "choose one of k1, k2, k3"),
        ({"epsilon_low": 1.5}, "epsilon_low=1.5"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1"),
        ({"delta": 3.0, "loss": "gspo"}, "does nothing with loss 'gspo'"),
        ({"delta": 1.1}, "must be above 1 \\+ epsilon_high"),
        ({"sapo_temperature_neg": 0.0}, "must be above 0"),
        ({"aggregation": "constant_length"}, "needs loss.max_completion_length"),
        ({"beta": -1.0}, "beta=-1.0"),
    ],
)
def test_contradictory_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)
