"""The rows whose log-probabilities differ most between trainer and engine, as a person would look at them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from app.guards.row_file import rows_of
from app.maths.masking import masked_mean, select
from app.types import TrainBatch, TrainRow


@dataclass(frozen=True, kw_only=True)
class WorstRow:
    """One row."""

    rank: int
    """Process that held it."""
    mean_abs_diff: float
    """Mean of |old - rollout| over its tokens, nats: what it is ranked by."""
    row: TrainRow
    """As it was trained on; `old_logprobs` are those that the correction compared."""


def worst_rows(micro_batches: Sequence[tuple[TrainBatch, Tensor]], limit: int, rank: int) -> list[WorstRow]:
    """Return the rows of largest mean |old - rollout|, worst first; rows that cannot be compared are left out.

    Args:
        micro_batches: rows, and old log-probabilities [B, T] in nats.
        limit: how many rows.
        rank: of this process.
    """
    means = [_row_means(batch, old) for batch, old in micro_batches]
    places = [(mean, i, row) for i, column in enumerate(means) for row, mean in enumerate(column) if mean > 0]
    worst = heapq.nlargest(limit, places)
    found = []
    for i, (batch, old) in enumerate(micro_batches):
        rows = [(mean, row) for mean, part, row in worst if part == i]
        for (mean, _), recorded in zip(rows, rows_of(batch, old, [row for _, row in rows]), strict=True):
            found.append(
                WorstRow(
                    rank=rank,
                    mean_abs_diff=mean,
                    row=TrainRow(
                        prompt_ids=recorded.row.prompt_ids,
                        completion_ids=recorded.row.completion_ids,
                        rollout_logprobs=recorded.row.rollout_logprobs,
                        old_logprobs=recorded.new_logprobs,
                        advantage=recorded.row.advantage,
                        reward=recorded.row.reward,
                    ),
                )
            )
    return merged([found], limit)


def merged(ranks: Sequence[Sequence[WorstRow]], limit: int) -> list[WorstRow]:
    """Return the worst rows of all ranks; of equal completions of a prompt only the worst."""
    rows = sorted((row for rank in ranks for row in rank), key=lambda row: row.mean_abs_diff)
    different = {(row.row.prompt_ids, row.row.completion_ids): row for row in rows}
    return heapq.nlargest(limit, different.values(), key=lambda row: row.mean_abs_diff)


def _row_means(batch: TrainBatch, old: Tensor) -> list[float]:
    """Mean |old - rollout| of each row's tokens that have both values; 0 without any."""
    difference = (old - batch.rollout_logprobs).abs()
    comparable = batch.mask & ~difference.isnan()
    return masked_mean(select(difference, comparable).double(), comparable, dim=1).tolist()
