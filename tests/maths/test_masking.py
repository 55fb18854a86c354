from __future__ import annotations

import math

import pytest
import torch

from app.maths.masking import masked_max, masked_mean, masked_min, masked_sum, select

VALUES = torch.tensor([[1.0, 2.0, 5.0], [-3.0, 7.0, 9.0], [4.0, 4.0, 4.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("function", "by_row", "overall"),
    [
        (masked_sum, [3.0, -3.0, 0.0], 0.0),
        (masked_mean, [1.5, -3.0, 0.0], 0.0),
        (masked_max, [2.0, -3.0, 0.0], 2.0),
        (masked_min, [1.0, -3.0, 0.0], -3.0),
    ],
)
def test_values_by_hand(function, by_row, overall) -> None:
    assert function(VALUES, MASK, dim=1).tolist() == by_row
    assert function(VALUES, MASK, dim=(0, 1)).item() == overall
    assert function(VALUES, MASK).item() == overall


@pytest.mark.parametrize("function", [masked_mean, masked_max, masked_min])
def test_empty_mask_gives_the_chosen_value(function) -> None:
    nothing = torch.zeros_like(MASK)
    assert function(VALUES, nothing, empty=8.0).item() == 8.0
    assert function(VALUES, MASK, dim=1, empty=8.0)[2].item() == 8.0
    assert function(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), dim=1, empty=8.0).tolist() == [8.0, 8.0]
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.bool), empty=8.0).item() == 8.0


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_max, masked_min])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dim", [None, 1])
def test_poison_under_the_mask_reaches_neither_value_nor_gradient(function, poison, dim) -> None:
    values = torch.where(MASK, VALUES, poison).requires_grad_()
    result = function(values, MASK, dim=dim)
    assert torch.equal(result, function(VALUES, MASK, dim=dim))
    result.sum().backward()
    assert values.grad is not None
    assert values.grad.isfinite().all()
    assert (values.grad[~MASK] == 0).all()


def test_a_row_mask_broadcasts() -> None:
    rows = torch.tensor([[True], [False], [True]])
    assert masked_mean(VALUES, rows).item() == pytest.approx(20 / 6)


def test_wrong_masks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mask must be bool, got torch\.float32"):
        select(VALUES, MASK.float())
    with pytest.raises(ValueError, match=r"mask \(2, 3, 3\) does not broadcast to values \(3, 3\)"):
        select(VALUES, MASK.expand(2, 3, 3))
