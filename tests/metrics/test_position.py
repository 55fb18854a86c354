"""Mismatch by position: buckets counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from app.metrics import MismatchMetrics
from app.metrics.position import STARTS, SUMS, position_sums

KEY = "rollout_correction/abs_diff_at_position/"


def positions(metrics: MismatchMetrics) -> dict[str, float]:
    return {key: value for key, value in metrics.compute().items() if key.startswith(KEY)}


def test_buckets_by_hand() -> None:
    """|old - rollout| at position t is t + 1 in row 0 and 10 in row 1 (positions 0 to 3 only)."""
    old = torch.zeros(2, 9)
    gaps = torch.stack([torch.arange(1.0, 10.0), torch.full((9,), -10.0)])
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    metrics = MismatchMetrics()
    metrics.update(old, gaps, mask)
    wanted = {
        "000000": (1 + 10) / 2,
        "000001": (2 + 10) / 2,
        "000002": (3 + 4 + 10 + 10) / 4,
        "000004": (5 + 6 + 7 + 8) / 4,
        "000008": 9.0,
    }
    assert positions(metrics) == {KEY + name: value for name, value in wanted.items()}


def test_updates_of_other_widths_accumulate_and_bad_tokens_are_left_out() -> None:
    metrics = MismatchMetrics()
    metrics.update(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1).bool())
    metrics.update(
        torch.tensor([[0.0, math.inf], [0.0, 5.0]]),
        torch.tensor([[math.nan, 0.0], [-3.0, math.nan]]),
        torch.tensor([[True, True], [True, False]]),
    )
    metrics.update(torch.zeros(1, 1), None, torch.ones(1, 1).bool())
    assert positions(metrics) == {KEY + "000000": pytest.approx(2.0)}


def test_the_last_bucket_takes_the_rest() -> None:
    width = 200_000
    found = position_sums(torch.tensor([[2.0], [1.0]], dtype=torch.float64).expand(2, width))
    assert list(found) == list(SUMS)
    assert found[f"position_tokens_{STARTS[-1]}"] == width - 131072
    assert found[f"position_gap_{STARTS[-1]}"] == 2.0 * (width - 131072)
    assert found["position_tokens_65536"] == 65536
