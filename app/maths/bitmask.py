"""Selection by bits: as safe as `torch.where` against NaN and infinity at masked positions, and several times as fast.

A product with the mask would keep them, since 0 * NaN is NaN, and `where` is slow on a CPU. But `bits & 0` is 0 and
`bits & 0b11...1` is the value, whatever the bits say. So the mask is widened once to integers of the values' size,
-1 (all ones) for True and 0 for False, and each selection is one bitwise AND of the values seen as integers. The bits
of +0.0 are all 0. No gradient passes: where one is needed, use `app.maths.masking.select`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def keep_bits(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`mask` (bool, any shape) widened for `keep` of values of `dtype`, float32 or float64."""
    return mask.to(_INTEGERS[dtype]).neg_()


def keep(values: Tensor, bits: Tensor) -> Tensor:
    """`values` where the mask of `bits` was True, +0.0 elsewhere; shapes broadcast."""
    return (values.view(bits.dtype) & bits).view(values.dtype)


def keep_(values: Tensor, bits: Tensor) -> Tensor:
    """`keep` in place."""
    values.view(bits.dtype).bitwise_and_(bits)
    return values
