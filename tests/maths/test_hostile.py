"""Whatever stands under the mask, and however far apart the policies are, nothing is ever NaN."""

from __future__ import annotations

import dataclasses
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.maths.correction import PRESETS, CorrectionConfig, RejectionRule, correct
from app.maths.objective import LossConfig, policy_objective
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
        assert tensor.isfinite().all(), field.name
        if tensor.shape == mask.shape:
            assert not tensor[~mask].any(), f"{field.name} is not 0 where masked"
    assert (correction.is_weights >= 0).all()
    assert not (correction.mask & ~mask).any()


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    MASKS,
    CONFIGS,
    st.sampled_from(["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce"]),
    st.sampled_from(["token_mean", "row_mean", "constant_length"]),
    st.sampled_from(["k1", "k2", "k3"]),
)
def test_objective(data, mask, config, loss, aggregation, estimator) -> None:
    new, old, ref = (data.draw(policies(mask, LOGPROB, torch.float32)) for _ in range(3))
    rollout = data.draw(policies(mask, ROLLOUT, torch.float32))
    advantages = torch.tensor(data.draw(st.lists(st.floats(-10, 10, width=32), min_size=B, max_size=B)))
    advantages[~mask.any(dim=1)] = math.nan
    correction = correct(old, rollout, mask, config)
    keep = correction.mask & sequence_keep(new, rollout, mask, advantages, delta=0.5)[:, None]
    new.requires_grad_()
    parts = policy_objective(
        new, old, mask, advantages, is_weights=correction.is_weights, keep_mask=keep, ref_logprobs=ref,
        config=LossConfig(
            loss=loss, aggregation=aggregation, beta=0.1, kl_estimator=estimator, max_completion_length=T
        ),
        total_tokens=int(mask.sum()), total_rows=int(mask.any(dim=1).sum()), weight_kl=config.weight_kl,
    )  # fmt: skip
    parts.loss.backward()
    assert parts.loss.isfinite()
    assert parts.approx_kl_sum.isfinite()
    assert parts.ref_kl_sum.isfinite()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert (new.grad[~keep] == 0).all()
