"""Rejection rules and the veto: which tokens the loss must not see, whatever their weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from app.maths.correction.config import RejectionRule
from app.maths.correction.ratios import Ratios
from app.maths.divergence import kl_sampler_target_k2, kl_sampler_target_k3
from app.maths.masking import masked_mean, masked_sum

_DIVERGENCES = {"k2": kl_sampler_target_k2, "k3": kl_sampler_target_k3}


def rejected_tokens(ratios: Ratios, mask: Tensor, rules: Sequence[RejectionRule]) -> Tensor:
    """Valid tokens [B, T] that at least one rule drops (verl's rejection sampling, with bounds on train / rollout)."""
    rejected = torch.zeros_like(mask)
    for rule in rules:
        rejected |= _outside(ratios, mask, rule)
    return rejected & mask


def _outside(ratios: Ratios, mask: Tensor, rule: RejectionRule) -> Tensor:
    """Positions [B, T] whose value, at the rule's level, is beyond a bound of the rule."""
    if rule.statistic == "ratio":
        values = ratios.at("token" if rule.level == "max" else rule.level)
    else:
        values = _pooled(_DIVERGENCES[rule.statistic](ratios.clamped), mask, rule.level)
    outside = torch.zeros_like(mask)
    if rule.upper is not None:
        outside |= values > rule.upper
    if rule.lower is not None:
        outside |= values < rule.lower
    if rule.level == "max":  # the worst token decides for its row
        outside = (outside & mask).any(dim=1, keepdim=True).expand_as(mask)
    return outside


def _pooled(divergence: Tensor, mask: Tensor, level: str) -> Tensor:
    """Token divergences [B, T] pooled over the row: sum at `sequence`, mean at `geometric`."""
    if level == "sequence":
        return masked_sum(divergence, mask, dim=1)[:, None].expand_as(divergence)
    if level == "geometric":
        return masked_mean(divergence, mask, dim=1)[:, None].expand_as(divergence)
    return divergence


def vetoed_rows(log_ratio: Tensor, mask: Tensor, low: float | None, high: float | None) -> Tensor:
    """Rows [B] with a valid token whose ratio is below `low` or above `high` (verl's per-token veto).

    Log-ratios are compared unclamped: thresholds beyond e^-20 and e^20 act as well.
    """
    outside = torch.zeros_like(mask)
    if low is not None:
        outside |= log_ratio < math.log(low)
    if high is not None:
        outside |= log_ratio > math.log(high)
    return (outside & mask).any(dim=1)
