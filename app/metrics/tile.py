"""One tile of rows in float64, its counted tokens packed: what both vectors are summed from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from app.maths.correction import Correction, CorrectionConfig, correct
from app.maths.divergence import LOG_RATIO_BOUND
from app.metrics.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some rows and their N counted tokens: the valid ones with a finite log-ratio, row after row."""

    rows: Rows
    """The rows themselves."""
    valid_rows: Tensor
    """[B] bool: rows with a valid token."""
    counted: Tensor
    """[B, T] bool: the counted tokens."""
    lengths: Tensor
    """[B] counted tokens of each row."""
    gaps: Tensor
    """[B, T] old - rollout in nats; whatever it is where not counted."""
    old: Tensor
    """[N] nats."""
    rollout: Tensor
    """[N] nats."""
    difference: Tensor
    """[N] old - rollout in nats."""
    log_ratio: Tensor
    """[N] the same clamped to [-20, 20]."""
    ratio_m1: Tensor
    """[N] token ratio - 1."""
    weights: Tensor
    """[N] applied weights. Without a correction: the token ratio."""
    raw_ratio: Tensor
    """[N] ratio before control, at the level of the weight."""
    correction: Correction | None
    """What the correction did; None without one."""


def read_tile(rows: Rows, config: CorrectionConfig | None) -> Tile:
    """Read a tile.

    The weights are those before `batch_normalize`: it divides by a mean over the optimiser step, which these rows
    alone do not know, and afterwards the mean weight is 1 whatever happened.
    """
    old, rollout = rows.old_logprobs.double(), rows.rollout_logprobs.double()
    gaps = old - rollout
    counted = rows.mask & gaps.isfinite()
    lengths = counted.sum(1)
    whole = bool(lengths.sum() == counted.numel())
    where = None if whole else counted.flatten().nonzero().squeeze(1)

    def packed(values: Tensor) -> Tensor:
        return values.flatten() if where is None else values.flatten().index_select(0, where)

    difference = packed(gaps)
    log_ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_m1 = torch.expm1(log_ratio)
    weights = raw_ratio = ratio_m1 + 1
    correction = None
    if config is not None:
        correction = correct(old, rollout, rows.mask, dataclasses.replace(config, batch_normalize=False))
        if config.level != "none":
            weights, raw_ratio = packed(correction.measured_weights), packed(correction.raw_ratio)
    return Tile(
        rows=rows,
        valid_rows=rows.mask.sum(1) > 0,
        counted=counted,
        lengths=lengths,
        gaps=gaps,
        old=packed(old),
        rollout=packed(rollout),
        difference=difference,
        log_ratio=log_ratio,
        ratio_m1=ratio_m1,
        weights=weights,
        raw_ratio=raw_ratio,
        correction=correction,
    )


def largest(values: Tensor) -> Tensor:
    """Largest of [N], -inf of none (`amax` refuses an empty tensor)."""
    return values.amax() if values.numel() else values.new_tensor(-torch.inf)
