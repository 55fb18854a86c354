"""Rows to micro-batches and back: sorting by length, splitting by tokens, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from app.types import StepTotals, TrainBatch, TrainRow

NO_STEP = StepTotals(tokens=0, rows=0, micro_batches=0)
"""Totals of rows that are only scored."""


def row_to_score(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TrainRow:
    """Return a row of which nothing but the log-probabilities of its completion are wanted."""
    return TrainRow.of_completion(prompt_ids, completion_ids, rollout_logprobs=None, advantage=0.0, reward=0.0)


def collate(
    rows: Sequence[TrainRow],
    *,
    pad_token_id: int,
    totals: StepTotals = NO_STEP,
    correctable: bool = True,
    ends_rollout: bool = False,
) -> TrainBatch:
    """Pad `rows` to one batch (shapes and units: see TrainBatch).

    Rollout log-probabilities that a row lacks become NaN; old and reference ones are None when any row lacks them.
    The arguments after the padding matter only to training, not to scoring.
    """
    counts = tuple(row.sampled_count for row in rows)
    loss_mask = [row.loss_mask or (True,) * count for row, count in zip(rows, counts, strict=True)]
    rollout = [row.rollout_logprobs or (math.nan,) * count for row, count in zip(rows, counts, strict=True)]
    return TrainBatch(
        input_ids=pad([row.token_ids for row in rows], pad_token_id, torch.int64),
        positions=pad([row.positions for row in rows], 1, torch.int64),
        mask=torch.arange(max(counts)) < torch.tensor(counts)[:, None],
        loss_mask=pad(loss_mask, False, torch.bool),
        rollout_logprobs=pad(rollout, 0.0, torch.float32),
        policy_versions=pad([row.policy_versions for row in rows], 0, torch.int64),
        correctable=correctable,
        old_logprobs=_pad_logprobs([row.old_logprobs for row in rows]),
        ref_logprobs=_pad_logprobs([row.ref_logprobs for row in rows]),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
        lengths=tuple(len(row.token_ids) for row in rows),
        sampled_tokens=counts,
        totals=totals,
        ends_rollout=ends_rollout,
    )


def uncollate(batch: TrainBatch, indices: Sequence[int]) -> list[TrainRow]:
    """Return some rows of a batch as plain numbers: the inverse of `collate`, to float32.

    Args:
        batch: the batch that holds the rows.
        indices: which of its B rows, in the order wanted.
    """
    chosen = torch.tensor(indices, dtype=torch.int64, device=batch.input_ids.device)
    token_ids, advantages, rewards = (
        tensor[chosen].tolist() for tensor in (batch.input_ids, batch.advantages, batch.rewards)
    )
    per_token = {
        name: sampled_values(value, batch, indices)
        for name in ("positions", "rollout_logprobs", "policy_versions", "old_logprobs", "ref_logprobs", "loss_mask")
        if (value := getattr(batch, name)) is not None
    }
    rows = []
    for place, index in enumerate(indices):
        fields = {name: values[place] for name, values in per_token.items()}
        sampled = set(fields.pop("positions"))
        length = batch.lengths[index]
        rows.append(
            TrainRow(
                token_ids=tuple(token_ids[place][:length]),
                sampled=tuple(column in sampled for column in range(length)),
                advantage=advantages[place],
                reward=rewards[place],
                **fields,
            )
        )
    return rows


def sampled_values(values: Tensor, batch: TrainBatch, indices: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return what some rows have in `values` [B, T], as plain numbers, one for each sampled token of the row."""
    chosen = torch.tensor(indices, dtype=torch.int64, device=values.device)
    found = values[chosen].tolist()
    return [tuple(row[: batch.sampled_tokens[index]]) for row, index in zip(found, indices, strict=True)]


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
