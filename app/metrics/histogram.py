"""Mergeable fine histograms: of log-ratios, for percentiles of |l| and of exp(l) within 1 %, and of applied weights.

Bins of |l|: 64 per octave below 1 nat (log-spaced), 64 per nat from 1 to 20 nats (even), mirrored for negative l,
with one bin for |l| < 2**-30 in the middle. A bin is represented by its middle, so the error is at most half a width:
1/128 of |l| below 1 nat, 1/128 nat above; relative to |l| and to exp(l) it is at most exp(1/128) - 1 = 0.8 %.

The bin comes from the bits of the float32 number (the idea of HdrHistogram: leading mantissa bits are even
sub-buckets of an octave), so it needs no logarithm and is the same on every device and for every tile shape.

Weights: a bin for 0 (a weight masked out), even bins of 1/512 up to 8, a bin for all above.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 20.0
"""Values beyond count as this many nats, as in the ratios (exp is taken of l clamped to [-20, 20])."""
_SMALLEST_EXPONENT = -30
_PER_UNIT = 64  # bins an octave below 1, and bins a nat above: 2**6, hence 6 mantissa bits are kept of 23
_MANTISSA_SHIFT = 23 - 6
_FIRST = (_SMALLEST_EXPONENT + 127) * _PER_UNIT
_BELOW_ONE = -_SMALLEST_EXPONENT * _PER_UNIT
_PER_SIGN = _BELOW_ONE + int(LARGEST - 1) * _PER_UNIT
BINS = 2 * _PER_SIGN + 1
LARGEST_WEIGHT = 8
"""Larger weights share the last bin."""
WEIGHTS_PER_UNIT = 512
"""Bins of weights in an interval of 1."""
WEIGHT_BINS = 1 + LARGEST_WEIGHT * WEIGHTS_PER_UNIT + 1


def count(log_ratio: Tensor) -> Tensor:
    """Histogram of log-ratios in nats (any shape, no NaN): counts [BINS] int64, from the most negative bin up."""
    signed = log_ratio.flatten().to(torch.float32)
    size = signed.abs()
    below_one = (size.view(torch.int32) >> _MANTISSA_SHIFT) - _FIRST
    above_one = (size.clamp(max=LARGEST) * _PER_UNIT).to(torch.int32) + (_BELOW_ONE - _PER_UNIT)
    index = torch.where(size < 1, below_one, above_one).clamp_(min=-1, max=_PER_SIGN - 1) + 1
    index = torch.where(signed < 0, -index, index) + _PER_SIGN
    return torch.bincount(index, minlength=BINS)


def count_weights(weights: Tensor) -> Tensor:
    """Histogram of weights (any shape, 0 or more, no NaN): counts [WEIGHT_BINS] int64, the first of weights 0."""
    index = (weights.flatten().clamp(max=LARGEST_WEIGHT) * WEIGHTS_PER_UNIT).to(torch.int32) + 1
    return torch.bincount(index.mul_(weights.flatten() > 0), minlength=WEIGHT_BINS)


def percentile(counts: Tensor, share: float, *, absolute: bool) -> float:
    """Percentile in nats from `counts` [BINS] float64 on the CPU, at least one of them above 0.

    It is the smallest value with at least this share of all at or below it (nearest rank: interpolation would invent
    values between far apart ones). `absolute`: of |l|, else of l.
    """
    zero = _PER_SIGN
    if absolute:
        counts = torch.cat([counts[zero : zero + 1], counts[zero + 1 :] + counts[:zero].flip(0)])
        zero = 0
    cumulative = counts.cumsum(0)
    # Ranks are whole numbers: the rounding error of share * n must not push the rank one up.
    rank = max(1.0, share * float(cumulative[-1]) - 1e-6)
    return _centre(int(torch.searchsorted(cumulative, rank)) - zero)


def centres() -> Tensor:
    """Middles of the log-ratio bins [BINS] float64, in nats."""
    return torch.tensor([_centre(i) for i in range(-_PER_SIGN, _PER_SIGN + 1)], dtype=torch.float64)


def _centre(index: int) -> float:
    """Middle of a bin, `index` counted from the zero bin, its sign the value's."""
    size = abs(index) - 1
    if size < 0:
        return 0.0
    if size < _BELOW_ONE:
        octave, step = divmod(size, _PER_UNIT)
        middle = 2.0 ** (octave + _SMALLEST_EXPONENT) * (1 + (step + 0.5) / _PER_UNIT)
    else:
        middle = 1 + (size - _BELOW_ONE + 0.5) / _PER_UNIT
    return middle if index > 0 else -middle
