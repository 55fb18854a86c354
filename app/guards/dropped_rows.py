"""The rows that the off-policy sequence mask dropped: how many, why, and the worst of them with their tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class DroppedRow:
    """One row that the mask dropped."""

    step: int
    """Optimiser steps done when its micro-batch was."""
    rank: int
    """Process that held it."""
    drift: float
    """mean over its tokens of behaviour - new, nats: above the mask's delta."""
    advantage: float
    """Below 0, or it would have been kept."""
    reward: float
    """The weighted sum of its rewards."""
    prompt_ids: tuple[int, ...]
    """Its prompt."""
    completion_ids: tuple[int, ...]
    """Its completion."""
    difference: tuple[float, ...]
    """behaviour - new of each completion token, nats."""


@dataclass(frozen=True, kw_only=True)
class DroppedReport:
    """What the mask did in an interval."""

    rows: int
    """Rows seen."""
    negative: int
    """Of them with an advantage below 0."""
    dropped: int
    """Of these with a drift above delta."""
    spared: int
    """Rows with a drift above delta and an advantage of 0 or more: they are kept."""
    drift_max: float
    """Largest drift of any row, nats per token."""
    worst: tuple[DroppedRow, ...]
    """The dropped rows of largest drift, worst first; of equal completions of a prompt only the worst."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DroppedReport:
        """Return the report of which `dataclasses.asdict` gave `fields`."""
        return cls(**{**fields, "worst": tuple(DroppedRow(**row) for row in fields["worst"])})

    @staticmethod
    def merged(reports: Sequence[DroppedReport], limit: int) -> DroppedReport:
        """Return the report of all ranks' rows, with the `limit` worst of them."""
        rows = sorted((row for report in reports for row in report.worst), key=lambda row: row.drift)
        # a group often holds one completion several times, and several passes meet it again: once is enough to look at
        different = {(row.prompt_ids, row.completion_ids): row for row in rows}
        worst = heapq.nlargest(limit, different.values(), key=lambda row: row.drift)
        return DroppedReport(
            rows=sum(report.rows for report in reports),
            negative=sum(report.negative for report in reports),
            dropped=sum(report.dropped for report in reports),
            spared=sum(report.spared for report in reports),
            drift_max=max((report.drift_max for report in reports), default=float("-inf")),
            worst=tuple(worst),
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
        table = torch.stack([keep.double(), drift.double(), batch.advantages.double(), batch.rewards.double()])
        kept, drifts, advantages, rewards = table.tolist()  # one transfer
        dropped = [i for i, k in enumerate(kept) if not k]
        known = self._report.worst
        floor = known[-1].drift if known and len(known) == self.limit else -math.inf
        beats = [i for i in dropped if drifts[i] > floor]
        worst = heapq.nlargest(4 * self.limit, beats, key=lambda i: drifts[i])  # some of them may be equal
        chosen = torch.tensor(worst, dtype=torch.int64, device=drift.device)
        ids, differences = batch.input_ids[chosen].tolist(), difference[chosen].tolist()
        found = DroppedReport(
            rows=len(kept),
            negative=sum(a < 0 for a in advantages),
            dropped=len(dropped),
            spared=sum(d > self.delta and a >= 0 for d, a in zip(drifts, advantages, strict=True)),
            drift_max=max(drifts),
            worst=tuple(
                DroppedRow(
                    step=step,
                    rank=rank,
                    drift=drifts[i],
                    advantage=advantages[i],
                    reward=rewards[i],
                    prompt_ids=tuple(ids[place][: batch.prompt_tokens[i]]),
                    completion_ids=tuple(ids[place][batch.prompt_tokens[i] :][: batch.completion_tokens[i]]),
                    difference=tuple(differences[place][: batch.completion_tokens[i]]),
                )
                for place, i in enumerate(worst)
            ),
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
