"""Rejection rules and the veto: which tokens the loss must not see, whatever their weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from app.maths.correction.config import CorrectionConfig, RejectionRule
from app.maths.correction.ratios import Ratios


def kept_tokens(ratios: Ratios, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Valid tokens [B, T] that neither a rule nor the veto drops, and the rows [B] that the veto drops.

    Without rules and veto the first is the mask itself, not a copy.
    """
    kept, vetoed = ratios.mask, ratios.mask.new_zeros(len(ratios.mask))
    if config.rejection:
        kept = kept & _spread(within_rules(ratios, config.rejection), kept)
    if config.vetoes:
        vetoed = vetoed_rows(ratios, config.veto_low, config.veto_high)
        kept = kept & _spread(~vetoed[:, None], kept)
    return kept, vetoed


def _spread(verdict: Tensor, like: Tensor) -> Tensor:
    """`verdict`, perhaps of rows [B, 1], for each token: bool operations that broadcast take eight times as long."""
    return verdict.expand_as(like).contiguous()


def within_rules(ratios: Ratios, rules: Sequence[RejectionRule]) -> Tensor:
    """Where all rules keep the token (verl's rejection sampling, with bounds on train / rollout).

    Returns:
        bool, [B, T] or, if all rules judge rows, [B, 1]; not selected by the mask.
    """
    kept = _within(ratios, rules[0])
    for rule in rules[1:]:
        kept = kept & _within(ratios, rule)
    return kept


def _within(ratios: Ratios, rule: RejectionRule) -> Tensor:
    """Where the value at the rule's level is beyond no bound of the rule: [B, T], or [B, 1] of whole rows."""
    values = _values(ratios, rule)
    outside = torch.zeros_like(values, dtype=torch.bool)
    if rule.upper is not None:
        outside |= values > rule.upper
    if rule.lower is not None:
        outside |= values < rule.lower
    if rule.level == "max":  # the worst token decides for its row
        outside = (outside & ratios.mask).any(dim=1, keepdim=True)
    return ~outside


def _values(ratios: Ratios, rule: RejectionRule) -> Tensor:
    """What the rule judges; a row's token divergences are added at `sequence`, their mean is taken at `geometric`."""
    if rule.statistic == "ratio":
        return ratios.at("token" if rule.level == "max" else rule.level)
    divergence = ratios.k2 if rule.statistic == "k2" else ratios.k3
    if rule.level == "sequence":
        return divergence.sum(dim=1, keepdim=True)
    return ratios.row_mean(divergence) if rule.level == "geometric" else divergence


def vetoed_rows(ratios: Ratios, low: float | None, high: float | None) -> Tensor:
    """Rows [B] with a valid token whose ratio is below `low` or above `high` (verl's per-token veto).

    Log-ratios are compared unclamped: thresholds beyond e^-20 and e^20 act as well.
    """
    outside = torch.zeros_like(ratios.mask)
    if low is not None:
        outside |= ratios.log_ratio < math.log(low)
    if high is not None:
        outside |= ratios.log_ratio > math.log(high)
    return (outside & ratios.mask).any(dim=1)
