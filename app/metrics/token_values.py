"""One tile of rows in float64, 0 where a token does not count: what both vectors are summed from.

A token counts if it is valid and its log-ratio finite. All that is summed is 0 at the match of the two policies:
log-ratios, exp(l) - 1, weights - 1, probabilities - 1. So a position that is set to 0 adds nothing to a sum, rows need
not be packed, and the sums do not cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from app.maths import tiling
from app.maths.bitmask import keep, keep_, keep_bits
from app.maths.correction import Correction
from app.maths.correction.ratios import Ratios
from app.maths.divergence import LOG_RATIO_BOUND
from app.metrics.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some rows, [b, w] float64 where nothing else is said."""

    rows: Tensor
    """[b] int64: their indices."""
    valid: Tensor
    """bool: the valid tokens, at least one in each row."""
    counted: Tensor
    """bool: the counted tokens; `valid` itself if that is all of them."""
    missing: Tensor
    """[b] int32: valid tokens without a rollout log-probability."""
    old: Tensor
    """The trainer's log-probabilities in nats."""
    rollout: Tensor
    """The engine's log-probabilities in nats."""
    difference: Tensor
    """l = old - rollout in nats."""
    size: Tensor
    """The absolute difference |l| in nats."""
    within_bound: bool
    """Whether no l of a counted token is clamped."""
    log_ratio: Tensor
    """l clamped to [-20, 20]."""
    ratio_m1: Tensor
    """exp(l) - 1, l clamped."""
    raw_m1: Tensor
    """The ratio at the level of the weight, before control, - 1. At level `token` the same tensor as `ratio_m1`."""
    weight_m1: Tensor
    """The weight after control that the loss uses, - 1. Without a correction: the token ratio - 1, the same tensor."""
    ratios: Ratios
    """Ratios less 1 and what goes with them; missing tokens (l = 0) and infinite ones included."""
    kept: Tensor | None
    """bool: tokens that the correction keeps; `valid` itself if it drops none. None: there is no correction."""
    vetoed: Tensor | None
    """[b] bool: rows that the veto drops. None: there is no correction."""
    above: Tensor | None
    """bool: tokens whose ratio, or whose row's, is above the upper bound. None: there is no such bound."""
    below: Tensor | None
    """bool: tokens whose ratio, or whose row's, is below the lower bound. None: there is no such bound."""

    @cached_property
    def lengths(self) -> Tensor:
        """[b] int32: valid tokens of each row."""
        return self.ratios.lengths.squeeze(1)

    @cached_property
    def counted_lengths(self) -> Tensor:
        """[b] int32: counted tokens of each row."""
        return self.lengths if self.counted is self.valid else self.counted.sum(1, dtype=torch.int32)

    @cached_property
    def k3(self) -> Tensor:
        """exp(l) - 1 - l, l clamped; where all valid tokens count, the rules of the correction share it."""
        return self.ratios.k3 if self.counted is self.valid else self.ratio_m1 - self.log_ratio

    @cached_property
    def bits(self) -> Tensor:
        """The counted tokens, for `keep`."""
        return keep_bits(self.counted, torch.float64)

    @cached_property
    def weight(self) -> Tensor:
        """The applied weight; 1 where no token counts."""
        return self.weight_m1 + 1

    @cached_property
    def ratio_moments(self) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares of `ratio_m1`."""
        return moments(self.ratio_m1)

    @cached_property
    def row_difference(self) -> Tensor:
        """[b] sum of l."""
        return self.difference.sum(1)


def read_tile(rows: Rows, where: tiling.Tile, correction: Correction | None) -> Tile:
    """Read a tile; weights, masks and bounds are those of `correction`, computed once for loss and metrics.

    The weights are those before `batch_normalize`: it divides by a mean over the optimiser step, which these rows
    alone do not know, and afterwards the mean weight is 1 whatever happened.
    """
    valid = counted = where.cut(rows.mask)
    old, rollout = _logprobs(rows, where, valid)
    difference = log_ratio = old - rollout
    size = difference.abs()
    largest_size = float(size.amax())
    missing = valid.new_zeros(len(valid), dtype=torch.int32)
    everything = math.isfinite(largest_size)
    if not everything:  # some valid token does not count
        missing = (valid & rollout.isnan()).sum(1, dtype=torch.int32)
        counted = valid & difference.isfinite()
        log_ratio = keep(difference, keep_bits(~difference.isnan(), torch.float64))
        old, rollout, difference, size = _counted(counted, old, rollout, difference, size)
        largest_size = float(size.amax())
    within_bound = largest_size <= LOG_RATIO_BOUND
    ratios = Ratios(log_ratio, valid, within_bound=everything and within_bound, shift=1)
    log_ratio, ratio_m1 = ratios.clamped, ratios.token
    if not everything:
        log_ratio, ratio_m1 = _counted(counted, log_ratio, ratio_m1)
    raw_m1 = weight_m1 = ratio_m1
    if correction is not None and correction.config.level != "none":
        (weight_m1,) = _counted(counted, where.cut(correction.controlled).double() - 1)
        if correction.config.level != "token":
            (raw_m1,) = _counted(counted, ratios.at(correction.config.level))
    return Tile(
        rows=where.rows,
        valid=valid,
        counted=counted,
        missing=missing,
        old=old,
        rollout=rollout,
        difference=difference,
        size=size,
        within_bound=within_bound,
        log_ratio=log_ratio,
        ratio_m1=ratio_m1,
        raw_m1=raw_m1,
        weight_m1=weight_m1,
        ratios=ratios,
        kept=None if correction is None else where.cut(correction.kept) if correction.config.drops else valid,
        vetoed=None if correction is None else correction.vetoed[where.rows],
        above=None if correction is None or correction.above is None else where.cut(correction.above),
        below=None if correction is None or correction.below is None else where.cut(correction.below),
    )


def _logprobs(rows: Rows, where: tiling.Tile, valid: Tensor) -> tuple[Tensor, Tensor]:
    """A tile of both log-probabilities in float64, 0 where not valid."""
    old, rollout = where.cut(rows.old_logprobs), where.cut(rows.rollout_logprobs)
    if old.dtype != rollout.dtype:
        old, rollout = old.double(), rollout.double()
    bits = keep_bits(valid, old.dtype)
    return keep_(old, bits).double(), keep_(rollout, bits).double()


def _counted(counted: Tensor, *values: Tensor) -> list[Tensor]:
    """Float64 `values`, 0 where no token counts."""
    bits = keep_bits(counted, torch.float64)
    return [keep(value, bits) for value in values]


def largest(values: Tensor, counted: Tensor) -> Tensor:
    """Largest of the counted `values` [b, w], -inf of none; the other values are 0."""
    found = values.amax()
    if found > 0:  # no other value stands in its place
        return found
    picked = values[counted]
    return picked.amax() if picked.numel() else values.new_tensor(-torch.inf)


def smallest(values: Tensor, counted: Tensor) -> Tensor:
    """Smallest of the counted `values` [b, w], inf of none; the other values are 0."""
    found = values.amin()
    return found if found < 0 else -largest(-values, counted)


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and sum of squares."""
    flat = values.flatten()
    return flat.sum(), flat.dot(flat)
