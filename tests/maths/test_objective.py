from __future__ import annotations

import itertools
import math

import pytest
import torch

from app.maths.correction import correct, preset
from app.maths.objective import LOSS_FORMS, LossConfig, LossParts, check_combination, policy_objective

NEW = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.1, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.1, -1.9, -0.5], [-0.6, -1.2, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
REF = torch.tensor([[-1.2, -1.6, -0.9], [-0.7, -1.5, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = NEW < 9
ADVANTAGES = torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64)
WEIGHTS = torch.tensor([[2.0, 0.5, 1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
KEEP = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
AGGREGATIONS = ["token_mean", "row_mean", "constant_length"]  # those that do not depend on the cut
LOSSES = list(LOSS_FORMS)


def objective(new: torch.Tensor, rows: slice = slice(None), **changes) -> LossParts:
    """The objective over `rows` of the step above; `changes` are arguments, or fields of LossConfig."""
    arguments = {"is_weights": WEIGHTS, "keep_mask": KEEP, "ref_logprobs": REF, "denominator_mask": None}
    settings = {"loss_type": "grpo", "beta": 0.1, "max_completion_length": 4}
    options = {"weight_kl": True, "total_tokens": 5, "total_rows": 2, "micro_batches": 1, "old": OLD}
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


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_sum_to_the_whole_in_value_and_gradient(loss_type, aggregation) -> None:
    new = NEW.clone().requires_grad_()
    whole = objective(new, loss_type=loss_type, aggregation=aggregation)
    (expected,) = torch.autograd.grad(whole.loss, new)
    parts = [objective(new, slice(row, row + 1), loss_type=loss_type, aggregation=aggregation) for row in range(3)]
    total = sum(part.loss for part in parts)
    (actual,) = torch.autograd.grad(total, new)
    torch.testing.assert_close(total, whole.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_single_update_has_the_gradient_of_weighted_reinforce(loss_type) -> None:
    new = NEW.clone().requires_grad_()
    parts = objective(new, old=new.detach(), loss_type=loss_type, aggregation="token_mean", beta=0.0, keep_mask=None)
    parts.loss.backward()
    weights = (
        WEIGHTS if loss_type != "gspo" else torch.where(MASK, WEIGHTS.sum(1, True) / MASK.sum(1, True).clamp(min=1), 0)
    )
    torch.testing.assert_close(new.grad, -weights * ADVANTAGES[:, None] / 5, rtol=1e-12, atol=1e-15)
    assert parts.approx_kl_sum.item() == 0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_dropped_tokens_have_no_gradient_but_stay_in_the_denominator(loss_type) -> None:
    new = NEW.clone().requires_grad_()
    objective(new, loss_type=loss_type, is_weights=None).loss.backward()
    assert new.grad is not None
    assert (new.grad[~KEEP] == 0).all()
    assert (new.grad[KEEP] != 0).any()
    kept_value = objective(NEW, loss_type="reinforce", aggregation="token_mean", beta=0.0, is_weights=None).loss.item()
    by_hand = -(1.5 * (-1.0 - 0.5) - 0.5 * (-0.7 - 1.1)) / 5
    assert kept_value == pytest.approx(by_hand)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_everything_dropped_is_zero_with_a_gradient(loss_type, aggregation) -> None:
    new = NEW.clone().requires_grad_()
    parts = objective(new, loss_type=loss_type, aggregation=aggregation, keep_mask=torch.zeros_like(KEEP))
    parts.loss.backward()
    assert parts.loss.item() == 0
    assert parts.trained_tokens.item() == 0
    assert new.grad is not None
    assert (new.grad == 0).all()


def test_clip_masks_leave_dropped_tokens_out() -> None:
    old = OLD - 1.0  # every ratio is above 1.2
    everything = objective(NEW, old=old, keep_mask=None).clipped_high
    assert everything.int().tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]  # the second advantage is below 0
    assert objective(NEW, old=old).clipped_high.int().tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("name", "loss_type"), [("verl/seq_is", "dapo"), ("verl/bypass_pg_is", "reinforce")])
def test_sequence_weights_make_the_policy_gradient_unbiased(name, loss_type) -> None:
    """Over every row of two tokens from three symbols, weighed by its rollout probability."""
    rows = torch.tensor(list(itertools.product(range(3), repeat=2)))
    mask = torch.ones_like(rows, dtype=torch.bool)
    rollout = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logits = torch.tensor([0.1, -0.4, 0.6], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)[rows].prod(dim=1)
    new = logits.log_softmax(0)[rows]
    (expected,) = torch.autograd.grad(-(new.sum(dim=1).exp() * rewards).sum(), logits, retain_graph=True)

    config = preset(name, upper=1e6)
    loss = LossConfig(loss_type=loss_type, aggregation="constant_length", max_completion_length=1)
    check_combination(loss, config)
    correction = correct(new.detach(), rollout[rows], mask, config)
    parts = policy_objective(
        new, rollout[rows] if config.bypass else new.detach(), mask, rollout[rows].sum(dim=1).exp() * rewards,
        is_weights=correction.is_weights, keep_mask=correction.mask, config=loss, total_tokens=1, total_rows=1,
    )  # fmt: skip
    (actual,) = torch.autograd.grad(parts.loss, logits)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_the_parameters_of_a_surrogate_reach_it() -> None:
    """One token of ratio e^2 with A = -1, and one of each sign for SAPO's temperatures."""
    one = dict(is_weights=None, keep_mask=None, total_tokens=1, total_rows=1)
    new, old, mask = torch.tensor([[-1.0]]).double(), torch.tensor([[-3.0]]).double(), torch.tensor([[True]])
    capped = policy_objective(new, old, mask, torch.tensor([-1.0]), config=LossConfig(delta=3.0), **one)
    assert capped.loss.item() == pytest.approx(3.0)
    sapo = LossConfig(loss_type="sapo", sapo_temperature_pos=0.5, sapo_temperature_neg=2.0)
    for a, tau in ((1.0, 0.5), (-1.0, 2.0)):
        loss = policy_objective(new, old, mask, torch.tensor([a]), config=sapo, **one).loss.item()
        assert loss == pytest.approx(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(2.0) - 1))))


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss\.beta=0\.1 needs ref_logprobs"):
        objective(NEW, ref_logprobs=None)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_kept_denominators_equal_a_step_without_the_dropped_tokens(loss_type, aggregation) -> None:
    step = dict(loss_type=loss_type, aggregation=aggregation, denominator="kept")
    new = NEW.clone().requires_grad_()
    kept = objective(new, denominator_mask=KEEP, total_tokens=4, total_rows=2, **step)
    alone = policy_objective(
        new, OLD, KEEP, ADVANTAGES, is_weights=WEIGHTS, keep_mask=None, ref_logprobs=REF,
        config=LossConfig(**step, beta=0.1, max_completion_length=4), total_tokens=4, total_rows=2,
    )  # fmt: skip
    (expected,) = torch.autograd.grad(alone.loss, new)
    (actual,) = torch.autograd.grad(kept.loss, new)
    torch.testing.assert_close(kept.loss, alone.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert kept.token_count.item() == 5, "metrics still count every valid token"


def test_kept_denominators_by_hand() -> None:
    """Row 0 keeps 2 of 3 tokens, row 1 both; REINFORCE without weights or penalty."""
    step = dict(loss_type="reinforce", beta=0.0, is_weights=None)
    rows = [1.5 * -(-1.0 - 0.5), -0.5 * -(-0.7 - 1.1)]
    kept = dict(denominator_mask=KEEP, total_tokens=4, total_rows=2)
    assert objective(NEW, **step, **kept).loss.item() == pytest.approx(sum(rows) / 4)
    assert objective(NEW, **step, **kept, aggregation="row_mean").loss.item() == pytest.approx(
        (rows[0] / 2 + rows[1] / 2) / 2
    )
    assert objective(NEW, **step, aggregation="row_mean").loss.item() == pytest.approx((rows[0] / 3 + rows[1] / 2) / 2)


def test_micro_batch_token_mean_is_the_mean_of_means_and_depends_on_the_cut() -> None:
    step = dict(loss_type="reinforce", aggregation="micro_batch_token_mean", beta=0.0, is_weights=None, keep_mask=None)
    rows = [1.5 * -(-1.0 - 2.0 - 0.5), -0.5 * -(-0.7 - 1.1)]
    cut = [objective(NEW, slice(row, row + 1), micro_batches=3, **step).loss.item() for row in range(3)]
    assert sum(cut) == pytest.approx((rows[0] / 3 + rows[1] / 2 + 0) / 3)
    assert objective(NEW, micro_batches=1, **step).loss.item() == pytest.approx(sum(rows) / 5)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),  # four kept, one of them with weight 0
        ({"weight_kl": False}, 4),  # the penalty reaches that one too
        ({"weight_kl": False, "beta": 0.0}, 3),
        ({"weight_kl": False, "kl_in_reward": True}, 3),
        ({"is_weights": None}, 4),
        ({"keep_mask": None}, 4),
        ({"is_weights": None, "keep_mask": None}, 5),
    ],
)
def test_trained_tokens_are_those_that_reach_the_loss(changes, count) -> None:
    new = NEW.clone().requires_grad_()
    parts = objective(new, ref_logprobs=REF - 0.05, **changes)  # nowhere equal to NEW: each KL term has a gradient
    assert parts.trained_tokens.item() == count
    assert parts.trained_tokens.dtype == torch.int64
    parts.loss.backward()
    assert (new.grad != 0).sum().item() == count


def test_a_penalty_in_the_reward_leaves_the_loss_alone() -> None:
    new = NEW.clone().requires_grad_()
    parts = objective(new, beta=0.5, kl_in_reward=True)
    without = objective(new, beta=0.0)
    assert parts.kl_loss.item() == 0
    assert parts.loss.item() == without.loss.item()
    assert parts.ref_kl_sum.item() == pytest.approx((NEW - REF)[MASK].sum().item()), "k1, the estimator in the reward"
    assert objective(new, beta=0.5, kl_in_reward=True, ref_logprobs=None).ref_kl_sum.item() == 0
