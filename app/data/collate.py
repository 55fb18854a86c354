"""Rows to micro-batches: sorting by length, splitting by tokens, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from app.types import StepTotals, TrainBatch, TrainRow

NO_STEP = StepTotals(tokens=0, rows=0, micro_batches=0)
"""Totals of rows that are only scored."""


def row_to_score(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TrainRow:
    """Return a row of which nothing but the log-probabilities of its completion are wanted."""
    return TrainRow(
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        rollout_logprobs=None,
        advantage=0.0,
        reward=0.0,
    )


def collate(
    rows: Sequence[TrainRow],
    *,
    pad_token_id: int,
    totals: StepTotals = NO_STEP,
    correctable: bool = True,
    policy_version: int = -1,
    ends_rollout: bool = False,
) -> TrainBatch:
    """Pad `rows` to one batch (shapes and units: see TrainBatch).

    Rollout log-probabilities that a row lacks become NaN; old and reference ones are None when any row lacks them.
    The arguments after the padding matter only to training, not to scoring.
    """
    width = max(len(row.completion_ids) for row in rows)
    loss_mask = [row.loss_mask or (True,) * len(row.completion_ids) for row in rows]
    rollout = [row.rollout_logprobs or (math.nan,) * len(row.completion_ids) for row in rows]
    mask = torch.arange(width) < torch.tensor([len(row.completion_ids) for row in rows])[:, None]
    return TrainBatch(
        input_ids=pad([row.prompt_ids + row.completion_ids for row in rows], pad_token_id, torch.int64),
        mask=mask,
        loss_mask=pad(loss_mask, False, torch.bool),
        rollout_logprobs=pad(rollout, 0.0, torch.float32),
        correctable=correctable,
        old_logprobs=_pad_logprobs([row.old_logprobs for row in rows]),
        ref_logprobs=_pad_logprobs([row.ref_logprobs for row in rows]),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
        prompt_tokens=tuple(len(row.prompt_ids) for row in rows),
        completion_tokens=tuple(len(row.completion_ids) for row in rows),
        totals=totals,
        policy_version=policy_version,
        ends_rollout=ends_rollout,
    )


def pad(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """Right-pad lists of numbers to one [B, longest] tensor."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def _pad_logprobs(rows: Sequence[tuple[float, ...] | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return pad(present, 0.0, torch.float32) if len(present) == len(rows) else None


def split_by_tokens(lengths: Sequence[int], budget: int | None) -> list[slice]:
    """Cut consecutive rows into runs of at most `budget` padded tokens (rows x longest); a longer row is alone.

    Rows should come sorted by length: little padding is lost then. None: one run.
    """
    if budget is None:
        return [slice(0, len(lengths))]
    runs, start, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and longest * (index + 1 - start) > budget:
            runs.append(slice(start, index))
            start, longest = index, length
    runs.append(slice(start, len(lengths)))
    return runs


def split_evenly(lengths: Sequence[int], parts: int) -> list[slice]:
    """Cut consecutive rows, sorted by length, into exactly `parts` non-empty runs of about equal padded tokens.

    Raises:
        ValueError: if there are fewer rows than parts.
    """
    rows = len(lengths)
    if rows < parts:
        raise ValueError(f"{rows} rows cannot be cut into {parts} micro-batches: lower accumulate_grad_batches")
    low, high = max(lengths, default=0), sum(lengths) + rows * max(lengths, default=0)
    while low < high:  # the least budget that needs no more than `parts` runs
        middle = (low + high) // 2
        if len(split_by_tokens(lengths, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    runs = split_by_tokens(lengths, low)
    while len(runs) < parts:  # fewer runs suffice for the budget: halve the longest, so that every part has rows
        widest = max(range(len(runs)), key=lambda i: runs[i].stop - runs[i].start)
        run = runs[widest]
        middle = (run.start + run.stop) // 2
        runs[widest : widest + 1] = [slice(run.start, middle), slice(middle, run.stop)]
    return runs
