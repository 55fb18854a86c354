"""Fine counts made coarse: histograms that TensorBoard can draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from app.metrics import histogram

BUCKETS = 128
"""About as many as are drawn: TensorBoard shows 30 over the range of all steps."""
_SHARE = 0.999
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-10, 2.0**4


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """What `SummaryWriter.add_histogram_raw` takes; empty buckets at both ends are left out."""

    limits: tuple[float, ...]
    """Upper limit of each bucket."""
    counts: tuple[float, ...]
    """Values in each bucket; one end bucket also holds what lies beyond."""
    minimum: float
    """Lower limit of the first bucket: the least value drawn, not the least there was."""
    maximum: float
    """Upper limit of the last bucket, the largest value drawn."""
    total: float
    """How many values were counted."""
    sum: float
    """Sum of all values, each taken as the middle of its fine bin (log-ratios: ± 0.8 %)."""
    sum_squares: float
    """Sum of their squares, likewise."""


def draw_log_ratios(counts: Tensor) -> Histogram | None:
    """Even buckets around 0 nats, from `histogram.fold`'s counts [BINS] float64 on the CPU; None if all are 0.

    The range is the power of two that holds 99.9 % of |l|, since a single outlier would press all else into one bar;
    the end buckets take the rest (`logprob_abs_diff_max` shows it). Limits lie on limits of the fine bins: no
    count is split.
    """
    if not counts.any():
        return None
    reach = histogram.percentile(counts, _SHARE, absolute=True)
    half = 2.0 ** math.ceil(math.log2(min(max(reach, _SMALLEST_HALF), _LARGEST_HALF)))
    width = half / (BUCKETS // 2)
    centres = histogram.centres()
    bucket = (centres / width).round().clamp(-BUCKETS // 2, BUCKETS // 2) + BUCKETS // 2
    coarse = counts.new_zeros(BUCKETS + 1).index_add(0, bucket.long(), counts)
    limits = (torch.arange(BUCKETS + 1) - BUCKETS // 2 + 0.5).double() * width
    return _trimmed(coarse, limits, limits - width, counts, centres)


def draw_weights(counts: Tensor) -> Histogram | None:
    """Weight 0 in a bucket of its own, then even buckets, from `histogram.fold_weights`'s counts; None if all are 0.

    The buckets reach to the power of two (2, 4 or 8) that holds the largest weight, a weight truncated to just that
    number in the last. The bucket of weight 0 lies left of 0, as wide as the others: without width it is not seen.
    """
    if not counts.any():
        return None
    fine = torch.arange(histogram.WEIGHT_BINS, dtype=torch.float64)
    centres = ((fine - 0.5) / histogram.WEIGHTS_PER_UNIT).clamp(max=histogram.LARGEST_WEIGHT)
    centres[0] = 0
    largest = float(centres[counts.nonzero()[-1]])
    fine_width = 1 / histogram.WEIGHTS_PER_UNIT
    reach = next((reach for reach in (2, 4) if largest < reach + fine_width), histogram.LARGEST_WEIGHT)
    width = reach / BUCKETS
    bucket = (centres / width).floor().clamp(max=BUCKETS - 1) + 1
    bucket[0] = 0
    coarse = counts.new_zeros(BUCKETS + 1).index_add(0, bucket.long(), counts)
    limits = torch.arange(BUCKETS + 1, dtype=torch.float64) * width
    return _trimmed(coarse, limits, limits - width, counts, centres)


def _trimmed(coarse: Tensor, upper: Tensor, lower: Tensor, counts: Tensor, centres: Tensor) -> Histogram:
    filled = coarse.nonzero().squeeze(1)
    drawn = slice(int(filled[0]), int(filled[-1]) + 1)
    return Histogram(
        limits=tuple(upper[drawn].tolist()),
        counts=tuple(coarse[drawn].tolist()),
        minimum=float(lower[drawn][0]),
        maximum=float(upper[drawn][-1]),
        total=float(counts.sum()),
        sum=float(counts.dot(centres)),
        sum_squares=float(counts.dot(centres.square())),
    )
