"""The rows that the off-policy sequence mask dropped: how many, why, and the worst of them with their tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.guards.worst_rows import WorstRow, rows_at, worst_of
from app.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class DroppedReport:
    """What the mask did in an interval."""

    rows: int
    """Rows that the mask judged in the interval."""
    negative: int
    """Rows of these with an advantage below 0."""
    dropped: int
    """Rows with an advantage below 0 and a drift above delta: the loss does not use them."""
    spared: int
    """Rows with a drift above delta and an advantage of 0 or more: they are kept."""
    drift_max: float
    """Largest drift of any row, nats per token."""
    worst: tuple[WorstRow, ...]
    """The dropped rows of largest drift (their score), worst first; of equal rows only the worst."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DroppedReport:
        """Return the report of which `dataclasses.asdict` gave `fields`."""
        return cls(**{**fields, "worst": tuple(WorstRow.of(row) for row in fields["worst"])})

    @staticmethod
    def merged(reports: Sequence[DroppedReport], limit: int) -> DroppedReport:
        """Return the report of all ranks' rows, with the `limit` worst of them."""
        return DroppedReport(
            rows=sum(report.rows for report in reports),
            negative=sum(report.negative for report in reports),
            dropped=sum(report.dropped for report in reports),
            spared=sum(report.spared for report in reports),
            drift_max=max((report.drift_max for report in reports), default=float("-inf")),
            worst=worst_of([report.worst for report in reports], limit),
        )


class DroppedRows:
    """Adds up what the mask did, and keeps the worst rows."""

    def __init__(self, delta: float, limit: int) -> None:
        """Start empty; `delta` is the mask's threshold in nats per token, `limit` how many rows are kept."""
        self.delta = delta
        self.limit = limit
        self._report = DroppedReport.merged([], limit)

    def add(self, batch: TrainBatch, keep: Tensor, drift: Tensor, difference: Tensor, step: int, rank: int) -> None:
        """Add a micro-batch.

        Args:
            batch: its rows.
            keep: [B] bool, what the mask said.
            drift: [B] nats per token.
            difference: [B, T] behaviour - new, nats.
            step: `global_step`.
            rank: of this process.
        """
        table = torch.stack([keep.double(), drift.double(), batch.advantages.double()])
        kept, drifts, advantages = table.tolist()  # one transfer
        dropped = [i for i, k in enumerate(kept) if not k]
        known = self._report.worst
        floor = known[-1].score if known and len(known) == self.limit else -math.inf
        beats = [i for i in dropped if drifts[i] > floor]
        worst = heapq.nlargest(4 * self.limit, beats, key=lambda i: drifts[i])  # some of them may be equal
        found = DroppedReport(
            rows=len(kept),
            negative=sum(a < 0 for a in advantages),
            dropped=len(dropped),
            spared=sum(d > self.delta and a >= 0 for d, a in zip(drifts, advantages, strict=True)),
            drift_max=max(drifts),
            worst=tuple(rows_at(batch, worst, drifts, difference, step=step, rank=rank)),
        )
        self._report = DroppedReport.merged([self._report, found], self.limit)

    @property
    def report(self) -> DroppedReport:
        """What was added since the last `take`."""
        return self._report

    def go_on(self, report: DroppedReport) -> None:
        """Go on from the report of an earlier process."""
        self._report = report

    def take(self) -> DroppedReport:
        """Return the report since the last call and start anew."""
        report, self._report = self._report, DroppedReport.merged([], self.limit)
        return report
