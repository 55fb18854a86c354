from __future__ import annotations

import math

import pytest
import torch

from app.maths.aggregate import constant_length, micro_batch_token_mean, row_mean, token_mean

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.nan, math.nan], [math.nan, math.nan, math.nan]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def test_by_hand() -> None:
    assert token_mean(VALUES, MASK, total_tokens=4).item() == 2.5
    assert row_mean(VALUES, MASK, total_rows=2).item() == 3.0  # (6/3 + 4/1) / 2
    assert constant_length(VALUES, MASK, total_rows=2, max_length=10).item() == 0.5  # 10 / (2 * 10)
    assert micro_batch_token_mean(VALUES, MASK, micro_batches=1).item() == 2.5


@pytest.mark.parametrize("split", [[1, 2], [2, 1], [1, 1, 1]])
def test_micro_batches_sum_to_the_whole(split) -> None:
    parts = list(zip(VALUES.split(split), MASK.split(split), strict=True))
    assert sum(token_mean(v, m, 4) for v, m in parts).item() == 2.5
    assert sum(row_mean(v, m, 2) for v, m in parts).item() == 3.0
    assert sum(constant_length(v, m, 2, 10) for v, m in parts).item() == 0.5


@pytest.mark.parametrize(
    ("split", "expected"), [([1, 2], (2 + 4) / 2), ([2, 1], (2.5 + 0) / 2), ([1, 1, 1], (2 + 4 + 0) / 3)]
)
def test_the_mean_of_micro_batch_means_depends_on_the_cut(split, expected) -> None:
    parts = zip(VALUES.split(split), MASK.split(split), strict=True)
    assert sum(micro_batch_token_mean(v, m, len(split)) for v, m in parts).item() == expected


def test_nothing_at_all_is_zero_with_a_gradient() -> None:
    values = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    total = token_mean(values, nothing, 0) + row_mean(values, nothing, 0) + constant_length(values, nothing, 0, 5)
    total = total + micro_batch_token_mean(values, nothing, 2)
    total.backward()
    assert total.item() == 0
    assert values.grad is not None
    assert (values.grad == 0).all()
