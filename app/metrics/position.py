"""The mismatch by place among the sampled tokens of a row: does it grow with length, or sit at the start?"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from app.metrics.state import Totals

STARTS = (0, *(1 << power for power in range(18)))
"""First position of each bucket: 0, 1, 2-3, 4-7, ...; the last takes 131072 and beyond."""
SUMS = (*(f"position_gap_{start}" for start in STARTS), *(f"position_tokens_{start}" for start in STARTS))
"""Entries of the vector."""


def position_sums(columns: Tensor) -> dict[str, Tensor]:
    """Sums of |l| and tokens of each bucket, by the names in SUMS; position 0 is the first sampled token.

    Args:
        columns: [2, T] float64, sums over the rows: of |old - rollout| in nats, and of the tokens that count.
    """
    width = columns.shape[1]
    edges = (*(min(start, width) for start in STARTS), width)
    parts = columns.split([right - left for left, right in pairwise(edges)], dim=1)
    buckets = torch.stack([part.sum(1) for part in parts], dim=1)
    return dict(zip(SUMS, buckets.flatten(), strict=True))


def position_means(totals: Totals) -> dict[str, float]:
    """Mean |old - rollout| in nats by bucket: `abs_diff_at_position/000004` for positions 4 to 7; none if empty."""
    return {
        f"abs_diff_at_position/{start:06d}": totals[f"position_gap_{start}"] / totals[f"position_tokens_{start}"]
        for start in STARTS
        if totals[f"position_tokens_{start}"]
    }
