"""Coarse histograms against counts taken from the values themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.maths.correction import CorrectionConfig
from app.metrics import MismatchMetrics, histogram
from app.metrics.drawing import Histogram, draw_log_ratios, draw_weights
from tests.metrics.counting import count, count_weights
from tests.metrics.reference import KEY, make_rows


def assert_counts_are_of(drawn: Histogram, values: Tensor) -> None:
    """Every bucket but the end ones holds exactly the values between its limits; the end ones hold the rest too."""
    edges = torch.tensor([drawn.minimum, *drawn.limits], dtype=torch.float64)
    inner = values.clamp(edges[0] + 1e-9, edges[-1] - 1e-9)
    wanted = torch.histogram(inner, bins=edges).hist
    assert drawn.counts == tuple(wanted.tolist())
    assert drawn.maximum == drawn.limits[-1]
    assert drawn.total == len(values) == sum(drawn.counts)


@pytest.mark.parametrize("scale", [1e-3, 0.02, 0.3, 5.0])
def test_log_ratios(scale: float) -> None:
    """In float32 as `count` sees them, away from the limits: every count is exact."""
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * scale
    values = noise.clamp(-20, 20).double()
    drawn = draw_log_ratios(count(values).double())
    assert drawn is not None
    assert_counts_are_of(drawn, values)
    width = drawn.limits[1] - drawn.limits[0]
    assert 60 <= len(drawn.counts) <= 129
    assert any(lower == -width / 2 for lower in drawn.limits)  # one bucket is centred on 0
    beyond = float((values.abs() > 64 * width).double().mean())
    assert beyond <= 0.001 or width == 0.25
    assert drawn.sum == pytest.approx(float(values.sum()), abs=0.008 * float(values.abs().sum()))
    assert drawn.sum_squares == pytest.approx(float(values.square().sum()), rel=0.016)


def test_one_outlier_does_not_widen_the_range() -> None:
    values = torch.full((5000,), 0.01, dtype=torch.float64)
    values[0] = -15.0
    drawn = draw_log_ratios(count(values).double())
    assert drawn is not None
    assert -0.02 < drawn.minimum < drawn.maximum < 0.02
    assert drawn.counts[0] == 1.0


def test_equal_policies_are_one_bar_at_zero() -> None:
    drawn = draw_log_ratios(count(torch.zeros(7)).double())
    assert drawn is not None
    assert drawn.counts == (7.0,)
    assert drawn.minimum == -drawn.maximum


@pytest.mark.parametrize(("upper", "reach"), [(1.9, 2.0), (2.0, 2.0), (2.01, 4.0), (5.0, 8.0), (100.0, 8.0)])
def test_weights(upper: float, reach: float) -> None:
    values = torch.exp(torch.randn(20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    values = values.clamp(max=upper)
    values[:100] = 0.0
    drawn = draw_weights(count_weights(values).double())
    assert drawn is not None
    width = reach / 128
    assert drawn.minimum == -width
    assert drawn.limits[0] == 0.0
    assert drawn.counts[0] == 100.0
    assert drawn.limits[-1] <= reach
    moved = torch.where(values == 0, -width / 2, values.clamp(max=reach - 1e-6))
    assert_counts_are_of(drawn, moved)


def test_no_data() -> None:
    assert draw_log_ratios(torch.zeros(histogram.BINS, dtype=torch.float64)) is None
    assert draw_weights(torch.zeros(histogram.WEIGHT_BINS, dtype=torch.float64)) is None
    assert MismatchMetrics().histograms() == {}


def test_the_collection_draws_both() -> None:
    old, rollout, mask = make_rows(seed=2)
    metrics = MismatchMetrics(CorrectionConfig(level="token", control="mask", lower=0.8, upper=1.3))
    metrics.update(old, rollout, mask)
    found = metrics.histograms()
    assert found.keys() == {KEY + "log_ratio", KEY + "is_weight"}
    assert {drawn.total for drawn in found.values()} == {float(mask.sum())}
    ratio = torch.exp((old - rollout)[mask])
    assert found[KEY + "is_weight"].counts[0] == int(((ratio < 0.8) | (ratio > 1.3)).sum())
