"""Mergeable fine histograms: of log-ratios, for percentiles of |l| and of exp(l) within 1 %, and of applied weights.

Bins of |l|: 64 per octave below 1 nat (log-spaced), 64 per nat from 1 to 20 nats (even), mirrored for negative l,
with one bin for |l| < 2**-30 in the middle. A bin is represented by its middle, so the error is at most half a width:
1/128 of |l| below 1 nat, 1/128 nat above; relative to |l| and to exp(l) it is at most exp(1/128) - 1 = 0.8 %.

The bin comes from the bits of the float32 number (the idea of HdrHistogram: leading mantissa bits are even
sub-buckets of an octave), so it needs no logarithm and is the same on every device and for every tile shape. Tiles
are counted in raw bins, which are cheaper to find and finer: of each octave as many as its finest needs. Their counts
are added up and folded into the bins above once; each raw bin lies in one of them.

Weights: a bin for 0 (a weight masked out), even bins of 1/512 up to 8, a bin for all above.
"""

from __future__ import annotations

from functools import cache

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
ZERO_BIN = _PER_SIGN
"""The bin of 0 nats."""
LARGEST_WEIGHT = 8
"""Larger weights share the last bin."""
WEIGHTS_PER_UNIT = 512
"""Bins of weights in an interval of 1."""
WEIGHT_BINS = 1 + LARGEST_WEIGHT * WEIGHTS_PER_UNIT + 1
WEIGHT_ONE_BIN = 1 + WEIGHTS_PER_UNIT
"""The bin of weight 1."""

# Raw bins are numbered from 1 at 2**-30, by exponent and leading mantissa bits; 0 takes what is smaller.
_RAW_SHIFT = 23 - 10  # 1024 an octave: 1/64 nat in the octave 16 to 32
_RAW_FIRST = (_SMALLEST_EXPONENT + 127 << 10) - 1
_RAW_PER_SIGN = (4 + 127 << 10) + 256 - 1 - _RAW_FIRST  # 20 is 256 raw bins above 2**4
RAW_BINS = 2 * _RAW_PER_SIGN + 1
_RAW_WEIGHT_SHIFT = 23 - 11  # 2048 an octave: 1/512 in the octave 4 to 8
_RAW_WEIGHT_FIRST = (_SMALLEST_EXPONENT + 127 << 11) - 1
RAW_WEIGHT_BINS = (3 + 127 << 11) - _RAW_WEIGHT_FIRST + 1


class Tally:
    """Counts indices of many calls with few `bincount`, each of which clears and returns all bins."""

    _ENOUGH = 1 << 17

    def __init__(self, bins: int) -> None:
        """Start empty."""
        self._bins = bins
        self._counts: Tensor | None = None
        self._waiting: list[Tensor] = []

    def add(self, index: Tensor) -> None:
        """Count the values of `index` [N] int32, each below `bins`."""
        self._waiting.append(index)
        if sum(len(waiting) for waiting in self._waiting) >= self._ENOUGH:
            self._counts = self.counts()
            self._waiting = []

    def counts(self) -> Tensor:
        """Return the counts [bins] int64 of all that was added, once at least."""
        if not self._waiting and self._counts is not None:
            return self._counts
        found = torch.bincount(torch.cat(self._waiting), minlength=self._bins)
        return found if self._counts is None else found.add_(self._counts)


def raw_index(log_ratio: Tensor) -> Tensor:
    """Raw bins [N] int32 of log-ratios, 0 nats in the middle; their counts are for `fold`."""
    bits = log_ratio.flatten().to(torch.float32).view(torch.int32)
    sign = bits >> 31  # -1 or 0
    index = (bits & 0x7FFFFFFF).bitwise_right_shift_(_RAW_SHIFT).sub_(_RAW_FIRST).clamp_(0, _RAW_PER_SIGN)
    return index.bitwise_xor_(sign).sub_(sign).add_(_RAW_PER_SIGN)  # (x ^ -1) - -1 is -x


def raw_weight_index(weights: Tensor) -> Tensor:
    """Raw bins [N] int32 of weights, the first of weight 0; their counts are for `fold_weights`."""
    bits = weights.flatten().to(torch.float32).view(torch.int32)
    return (bits >> _RAW_WEIGHT_SHIFT).sub_(_RAW_WEIGHT_FIRST).clamp_(0, RAW_WEIGHT_BINS - 1)


def fold(raw: Tensor) -> Tensor:
    """Counts [BINS] from counts of `raw_index`."""
    return raw.new_zeros(BINS).index_add_(0, _bin_of_raw().to(raw.device), raw)


def fold_weights(raw: Tensor) -> Tensor:
    """Counts [WEIGHT_BINS] from counts of `raw_weight_index`."""
    return raw.new_zeros(WEIGHT_BINS).index_add_(0, _weight_bin_of_raw().to(raw.device), raw)


@cache
def _bin_of_raw() -> Tensor:
    """The bin [RAW_BINS] int64 that holds each raw bin."""
    size = (torch.arange(1, _RAW_PER_SIGN + 1, dtype=torch.int32).add_(_RAW_FIRST) << _RAW_SHIFT).view(torch.float32)
    below_one = (size.view(torch.int32) >> _MANTISSA_SHIFT) - _FIRST
    above_one = (size * _PER_UNIT).to(torch.int32) + (_BELOW_ONE - _PER_UNIT)
    index = torch.where(size < 1, below_one, above_one).clamp_(max=_PER_SIGN - 1) + 1
    return torch.cat([-index.flip(0), index.new_zeros(1), index]).long() + _PER_SIGN


@cache
def _weight_bin_of_raw() -> Tensor:
    """The weight bin [RAW_WEIGHT_BINS] int64 that holds each raw bin."""
    bits = torch.arange(1, RAW_WEIGHT_BINS, dtype=torch.int32).add_(_RAW_WEIGHT_FIRST) << _RAW_WEIGHT_SHIFT
    index = (bits.view(torch.float32) * WEIGHTS_PER_UNIT).to(torch.int64) + 1
    return torch.cat([index.new_zeros(1), index])


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
