"""Whatever stands under the mask, and however far apart the policies are, nothing is ever NaN."""

from __future__ import annotations

import dataclasses
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.maths.advantages import decoupled_advantages
from app.maths.correction import PRESETS, CorrectionConfig, RejectionRule, correct
from app.maths.objective import LOSS_FORMS, LossConfig, policy_objective, reward_kl_penalty
from app.maths.offpolicy import sequence_keep

B, T = 3, 4
POISON = st.sampled_from([math.nan, math.inf, -math.inf, -1e10, 1e30])
LOGPROB = st.one_of(st.floats(-60, 5), st.sampled_from([0.0, -1e10, -1e-30]))
ROLLOUT = st.one_of(LOGPROB, st.sampled_from([math.nan, math.inf, -math.inf]))
EXTRA = [
    CorrectionConfig(
        level="geometric",
        control="mask",
        lower=0.5,
        batch_normalize=True,
        veto_low=1e-4,
        veto_high=1e4,
        rejection=[RejectionRule(level=level, statistic="k2", upper=2.0) for level in ("token", "sequence", "max")],
    ),
    CorrectionConfig(level="token", lower=0.1, upper=2.0, batch_normalize=True, log_only=True),
]
CONFIGS = st.sampled_from([*PRESETS.values(), *EXTRA])
MASKS = st.lists(st.booleans(), min_size=B * T, max_size=B * T).map(lambda bits: torch.tensor(bits).reshape(B, T))


@st.composite
def policies(draw, mask: Tensor, valid: st.SearchStrategy[float], dtype: torch.dtype) -> Tensor:
    """[B, T] log-probabilities: `valid` where the mask is, poison elsewhere."""
    values = [draw(valid if inside else POISON) for inside in mask.flatten().tolist()]
    return torch.tensor(values, dtype=dtype).reshape(B, T)


@settings(max_examples=150, deadline=None)
@given(st.data(), MASKS, CONFIGS, st.sampled_from([torch.float32, torch.float64]))
def test_correct(data, mask, config, dtype) -> None:
    old, rollout = (data.draw(policies(mask, valid, dtype)) for valid in (ROLLOUT, ROLLOUT))
    correction = correct(old, rollout, mask, config)
    for field in dataclasses.fields(correction):
        tensor = getattr(correction, field.name)
        if not isinstance(tensor, torch.Tensor):  # the settings, or a bound that there is none of
            continue
        assert tensor.isfinite().all(), field.name
        if tensor.shape == mask.shape:
            assert not tensor[~mask].any(), f"{field.name} is not 0 where masked"
    assert (correction.is_weights >= 0).all()
    assert not (correction.mask & ~mask).any()


LOSSES = st.fixed_dictionaries(
    {
        "loss_type": st.sampled_from(list(LOSS_FORMS)),
        "aggregation": st.sampled_from([None, "token_mean", "row_mean", "constant_length", "micro_batch_token_mean"]),
        "denominator": st.sampled_from(["all", "kept"]),
    }
)
ESTIMATORS = [None, "k1", "k2", "k3"]
PENALTIES = st.sampled_from(
    [
        {"beta": 0.0},
        *({"beta": 0.1, "kl_estimator": name} for name in ESTIMATORS),
        *({"beta": 0.1, "kl_estimator": name, "use_bias_correction_kl": True} for name in ESTIMATORS),
        *({"beta": 0.1, "kl_estimator": name, "kl_in_reward": True} for name in ESTIMATORS),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.data(), MASKS, CONFIGS, LOSSES, PENALTIES, st.booleans())
def test_objective(data, mask, config, loss, penalty, reject_all) -> None:
    new, old, ref = (data.draw(policies(mask, LOGPROB, torch.float32)) for _ in range(3))
    rollout = data.draw(policies(mask, ROLLOUT, torch.float32))
    advantages = torch.tensor(data.draw(st.lists(st.floats(-10, 10, width=32), min_size=B, max_size=B)))
    advantages[~mask.any(dim=1)] = math.nan
    correction = correct(old, rollout, mask, config)
    keep = correction.mask & sequence_keep(new, rollout, mask, advantages, delta=0.5)[:, None] & (not reject_all)
    counted = keep if loss["denominator"] == "kept" else mask
    new.requires_grad_()
    parts = policy_objective(
        new, old, mask, advantages, is_weights=correction.is_weights, keep_mask=keep, ref_logprobs=ref,
        config=LossConfig(**loss, **penalty, max_completion_length=T), total_tokens=int(counted.sum()),
        total_rows=int(counted.any(dim=1).sum()), micro_batches=2, denominator_mask=counted,
        weight_kl=config.weight_kl,
    )  # fmt: skip
    parts.loss.backward()
    for field in dataclasses.fields(parts):
        assert getattr(parts, field.name).isfinite().all(), field.name
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert (new.grad[~keep] == 0).all()
    assert 0 <= parts.trained_tokens <= keep.sum()
    if parts.trained_tokens == 0:
        assert parts.loss == 0
        assert (new.grad == 0).all()
    penalties = reward_kl_penalty(old, ref, mask, LossConfig(**{"kl_estimator": None, **penalty, "beta": 0.1}))
    assert penalties.isfinite().all()
    assert (penalties[~mask.any(dim=1)] == 0).all()


@settings(max_examples=150, deadline=None)
@given(LOGPROB, LOGPROB, LOGPROB, st.floats(-10, 10), LOSSES, PENALTIES)
def test_objective_of_a_single_token(new, old, ref, advantage, loss, penalty) -> None:
    """B = 1, T = 1: every aggregation is the token's own loss."""
    logprobs = torch.tensor([[new]], dtype=torch.float64, requires_grad=True)
    settings = {**loss, **penalty, "max_completion_length": 1}
    parts = [
        policy_objective(
            logprobs, torch.full((1, 1), old).double(), torch.ones(1, 1, dtype=torch.bool),
            torch.full((1,), advantage), is_weights=None, keep_mask=None, ref_logprobs=torch.full((1, 1), ref).double(),
            config=LossConfig(**{**settings, "aggregation": aggregation}), total_tokens=1, total_rows=1,
        )
        for aggregation in ("token_mean", "row_mean", "constant_length", "micro_batch_token_mean")
    ]  # fmt: skip
    assert parts[0].loss.isfinite()
    assert len({part.loss.item() for part in parts}) == 1
    assert parts[0].trained_tokens == 1
    (gradient,) = torch.autograd.grad(parts[0].loss, logprobs)
    assert gradient.isfinite().all()


REWARD = st.one_of(st.just(math.nan), st.floats(width=32, allow_nan=False, allow_infinity=False))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3)]).flatmap(
        lambda shape: st.tuples(
            st.just(shape[1]),
            st.lists(st.lists(REWARD, min_size=2, max_size=2), min_size=math.prod(shape), max_size=math.prod(shape)),
        )
    ),
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=2),
)
def test_decoupled_advantages(drawn, weights) -> None:
    group_size, rewards = drawn
    values = torch.tensor(rewards)
    advantages = decoupled_advantages(values, torch.tensor(weights), group_size)
    assert advantages.isfinite().all()
    assert (advantages[values.isnan().all(dim=1)] == 0).all()
    assert abs(advantages.double().sum()) < 1e-3
