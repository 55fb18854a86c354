"""The mismatch by position in the completion: does it grow with length, or sit at its start?"""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.masking import masked_sum
from app.metrics.measure import Rows, one_thread
from app.metrics.vector import Layout, VectorMetric

STARTS = (0, *(1 << power for power in range(18)))
"""First position of each bucket: 0, 1, 2-3, 4-7, ...; the last takes 131072 and beyond."""


class PositionMismatch(VectorMetric):
    """Mean |old - rollout| in nats over the tokens of each position bucket; buckets without tokens are absent.

    Keys are `abs_diff_at_position/000004` for positions 4 to 7 from the completion's first token, 0.
    """

    def __init__(self) -> None:
        """Start empty."""
        super().__init__(Layout(sums=(*(f"sum_{i}" for i in STARTS), *(f"count_{i}" for i in STARTS))))

    def update(self, old_logprobs: Tensor, rollout_logprobs: Tensor | None, mask: Tensor) -> None:
        """Add rows: [B, T] each; a token without a finite difference is left out."""
        if rollout_logprobs is None:
            return
        columns = torch.zeros(2, mask.shape[1], dtype=torch.float64, device=mask.device)
        rows = Rows(old_logprobs=old_logprobs.detach(), rollout_logprobs=rollout_logprobs.detach(), mask=mask)
        with one_thread():
            for tile in rows.tiles():
                size = (tile.old_logprobs.double() - tile.rollout_logprobs.double()).abs()
                counted = tile.mask & size.isfinite()
                columns[0] += masked_sum(size, counted, dim=0)
                columns[1] += counted.sum(0)
        starts = torch.tensor(STARTS, device=mask.device)
        bucket = torch.bucketize(torch.arange(mask.shape[1], device=mask.device), starts, right=True) - 1
        sums = columns.new_zeros(2, len(STARTS)).index_add(1, bucket, columns)
        self.add(sums.flatten())

    def compute(self) -> dict[str, float]:
        """Return the mean of each bucket that has tokens."""
        totals = self.totals()
        return {
            f"abs_diff_at_position/{start:06d}": totals[f"sum_{start}"] / totals[f"count_{start}"]
            for start in STARTS
            if totals[f"count_{start}"]
        }
