from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.maths.entropy_mask import top_entropy_threshold


@pytest.mark.parametrize(
    ("entropies", "quantile", "kept"),
    [
        ([0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.8, 0.6, 0.4, 1.0], 0.2, [0.9, 1.0]),
        ([0.1, 0.9, 0.5], 1.0, [0.1, 0.9, 0.5]),
        ([0.1, 0.9, 0.5], 1e-9, [0.9]),
        ([0.3], 0.2, [0.3]),
        ([0.2, 0.4], 0.5, [0.4]),
        ([0.0, 0.0, 0.0, 0.0, 1.0], 0.5, [0.0, 0.0, 0.0, 0.0, 1.0]),  # equality keeps
    ],
)
def test_by_hand(entropies, quantile, kept) -> None:
    values = torch.tensor(entropies, dtype=torch.float64)
    assert values[values >= top_entropy_threshold(values, quantile)].tolist() == kept


@given(
    st.lists(st.integers(0, 30).map(lambda i: i / 8), min_size=1, max_size=60), st.sampled_from([0.05, 0.2, 0.29, 0.5])
)
def test_keeps_what_the_interpolated_quantile_keeps(entropies, quantile) -> None:
    """TRL's mask is entropy >= torch.quantile(entropies, 1 - quantile)."""
    values = torch.tensor(entropies, dtype=torch.float64)
    expected = values >= torch.quantile(values, 1 - quantile) - 1e-9
    assert torch.equal(values >= top_entropy_threshold(values, quantile), expected)


@pytest.mark.parametrize("share", range(1, 101))
def test_the_share_is_not_lost_to_rounding(share) -> None:
    values = torch.arange(101.0)
    assert (values >= top_entropy_threshold(values, share / 100)).sum().item() == share + 1


def test_more_values_than_torch_quantile_takes() -> None:
    count = 2**24 + 3
    values = torch.arange(count, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.8)
    assert (values >= top_entropy_threshold(values, 0.5)).sum().item() == 2**23 + 2


def test_no_tokens() -> None:
    assert top_entropy_threshold(torch.zeros(0), 0.2).item() == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_in_is_dtype_out(dtype) -> None:
    threshold = top_entropy_threshold(torch.tensor([0.5, 1.5, 1.0], dtype=dtype, requires_grad=True), 0.5)
    assert threshold.dtype == dtype
    assert threshold.shape == ()
    assert threshold.item() == 1.0
    assert not threshold.requires_grad


@pytest.mark.parametrize(
    ("entropies", "quantile", "message"),
    [
        (torch.zeros(2, 3), 0.2, r"entropies \(2, 3\) must be \[N\]"),
        (torch.zeros(3), 0.0, r"quantile=0\.0"),
        (torch.zeros(3), 1.1, r"quantile=1\.1"),
        (torch.zeros(3), math.nan, "quantile=nan"),
        (torch.tensor([0.1, math.nan]), 0.2, "hold NaN"),
    ],
)
def test_bad_input_is_named(entropies, quantile, message) -> None:
    with pytest.raises(ValueError, match=message):
        top_entropy_threshold(entropies, quantile)
