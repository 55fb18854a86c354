"""Mismatch by position: buckets counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from app.metrics.position import PositionMismatch

KEY = "abs_diff_at_position/"


def test_buckets_by_hand() -> None:
    """|old - rollout| at position t is t + 1 in row 0 and 10 in row 1 (positions 0 to 3 only)."""
    old = torch.zeros(2, 9)
    gaps = torch.stack([torch.arange(1.0, 10.0), torch.full((9,), -10.0)])
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    metric = PositionMismatch()
    metric.update(old, gaps, mask)
    wanted = {
        "000000": (1 + 10) / 2,
        "000001": (2 + 10) / 2,
        "000002": (3 + 4 + 10 + 10) / 4,
        "000004": (5 + 6 + 7 + 8) / 4,
        "000008": 9.0,
    }
    assert metric.compute() == {KEY + name: value for name, value in wanted.items()}


def test_updates_of_other_widths_accumulate_and_bad_tokens_are_left_out() -> None:
    metric = PositionMismatch()
    metric.update(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1).bool())
    metric.update(
        torch.tensor([[0.0, math.inf], [0.0, 5.0]]),
        torch.tensor([[math.nan, 0.0], [-3.0, math.nan]]),
        torch.tensor([[True, True], [True, False]]),
    )
    metric.update(torch.zeros(1, 1), None, torch.ones(1, 1).bool())
    assert metric.compute() == {KEY + "000000": pytest.approx(2.0)}
