"""The rows that differ most between two policies, as the reports of guard and off-policy mask show them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from app.data.collate import sampled_values, uncollate
from app.maths.masking import masked_mean, select
from app.types import TrainBatch, TrainRow


@dataclass(frozen=True, kw_only=True)
class WorstRow:
    """One row of a report."""

    step: int
    """Optimiser steps done when its micro-batch was trained on."""
    rank: int
    """Index of the process that held the row."""
    score: float
    """What the row is ranked by, nats per token: mean |old - rollout|, or mean behaviour - new."""
    differences: tuple[float, ...]
    """Per sampled token, nats: old - rollout, or behaviour - new. NaN where one of the two is missing."""
    row: TrainRow
    """The row as it was trained on."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> WorstRow:
        """Return the row of which `dataclasses.asdict` gave `fields`."""
        return cls(**{**fields, "row": TrainRow(**fields["row"])})


def worst_of(parts: Sequence[Sequence[WorstRow]], limit: int) -> tuple[WorstRow, ...]:
    """Return the `limit` rows of largest score out of all parts, worst first.

    A group often holds one completion several times, and several passes meet it again: of equal rows only the worst
    is kept.
    """
    rows = sorted((row for part in parts for row in part), key=lambda row: row.score)
    different = {row.row.token_ids: row for row in rows}
    return tuple(heapq.nlargest(limit, different.values(), key=lambda row: row.score))


def rows_at(
    batch: TrainBatch, indices: Sequence[int], scores: Sequence[float], differences: Tensor, *, step: int, rank: int
) -> list[WorstRow]:
    """Return some rows of a micro-batch for a report.

    Args:
        batch: the micro-batch.
        indices: which of its B rows.
        scores: [B] what rows are ranked by, on the host.
        differences: [B, T] nats, see WorstRow.
        step: optimiser steps done.
        rank: of this process.
    """
    return [
        WorstRow(step=step, rank=rank, score=scores[index], differences=found, row=row)
        for index, row, found in zip(
            indices, uncollate(batch, indices), sampled_values(differences, batch, indices), strict=True
        )
    ]


def furthest_from_rollout(
    micro_batches: Sequence[tuple[TrainBatch, Tensor]], limit: int, *, step: int, rank: int
) -> tuple[WorstRow, ...]:
    """Return the rows of largest mean |old - rollout|; rows that cannot be compared, or do not differ, are left out.

    Args:
        micro_batches: rows, and the old log-probabilities [B, T] in nats that the correction compared.
        limit: how many rows.
        step: optimiser steps done.
        rank: of this process.
    """
    scores = [_row_means(batch, old) for batch, old in micro_batches]
    places = [(score, part, index) for part, column in enumerate(scores) for index, score in enumerate(column)]
    largest = heapq.nlargest(limit, [place for place in places if place[0] > 0])
    parts = []
    for part, (batch, old) in enumerate(micro_batches):
        indices = [index for _, other, index in largest if other == part]
        parts.append(rows_at(batch, indices, scores[part], old - batch.rollout_logprobs, step=step, rank=rank))
    return worst_of(parts, limit)


def _row_means(batch: TrainBatch, old: Tensor) -> list[float]:
    """Mean |old - rollout| over each row's tokens that have both values; 0 without any."""
    difference = (old - batch.rollout_logprobs).abs()
    comparable = batch.mask & ~difference.isnan()
    return masked_mean(select(difference, comparable).double(), comparable, dim=1).tolist()
