"""Selection by bits: whatever the bits of a value are, it is there, or it is +0.0."""

from __future__ import annotations

import math

import pytest
import torch

from app.maths.bitmask import keep, keep_, keep_bits

HOSTILE = [math.nan, math.inf, -math.inf, -1e10, 1e-40, -0.0, 0.0, 1.5, -2.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_kept_bit_by_bit_or_becomes_plus_zero(value: float, dtype: torch.dtype) -> None:
    values = torch.tensor([[value, value]], dtype=dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    bits = keep_bits(torch.tensor([[True, False]]), dtype)
    wanted = [[int(values.view(integers)[0, 0]), 0]]
    assert keep(values, bits).view(integers).tolist() == wanted
    assert keep_(values, bits).view(integers).tolist() == wanted
    assert values.view(integers).tolist() == wanted


def test_a_value_of_each_row_is_spread_over_its_tokens() -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    kept = keep(torch.tensor([[2.0], [3.0]]), keep_bits(mask, torch.float32))
    assert kept.tolist() == [[2.0, 0.0, 2.0], [0.0, 0.0, 3.0]]


def test_the_given_tensor_stays_as_it_is() -> None:
    values, mask = torch.tensor([1.0, 2.0]), torch.tensor([False, True])
    keep(values, keep_bits(mask, torch.float32))
    assert values.tolist() == [1.0, 2.0]
    assert mask.tolist() == [False, True]
