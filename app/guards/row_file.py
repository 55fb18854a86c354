"""Rows of an optimiser step on disk, as `python -m app replay` reads them.

JSON lines. The first line is a RowFileHeader; every other line is one row: the fields of TrainRow, `new_logprobs`, and
the text. Numbers survive bit for bit: Python writes the shortest decimal that reads back as the same float64, and every
float32 is one. Values that are not finite are the tokens NaN, Infinity and -Infinity, which Python's json reads and
writes, but strict JSON does not know.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from app.checkpoint.files import named_when_whole
from app.errors import LockstepError
from app.types import StepSums, StepTotals, TrainBatch, TrainRow

FORMAT = "lockstep-rows-1"
"""First entry of the first line; a reader of another format says so."""

Reason = Literal["loss", "gradient"]


@dataclass(frozen=True, kw_only=True)
class RowFileHeader:
    """What the rows of a file were part of."""

    step: int
    """Number of the optimiser step, from 1."""
    rank: int
    """Process that held the rows."""
    reason: Reason
    """What was not finite: the loss of a micro-batch, or the gradient alone."""
    gradient_norm: float | None
    """Of the step, before clipping. None: the strategy does not tell."""
    policy_version: int
    """`global_step` of the weights that sampled the rows."""
    correctable: bool
    """See TrainBatch."""
    totals: StepTotals
    """Of the whole optimiser step: the loss is normalised by it."""
    rows_on_rank: int
    """Rows of the step on this rank; the file may hold fewer."""
    settings: Mapping[str, Any]
    """By its key of the configuration, what the loss depends on (see `settings_of`)."""


@dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """A row of the file."""

    row: TrainRow
    """As it was trained on."""
    new_logprobs: tuple[float, ...]
    """One per completion id, nats: what the policy gave at the time."""
    prompt: str | None = None
    """Decoded. None: there was no tokenizer."""
    completion: str | None = None
    """Decoded. None: there was no tokenizer."""


def rows_of(batch: TrainBatch, new_logprobs: Tensor, indices: Sequence[int]) -> list[RecordedRow]:
    """Return some rows of a batch as plain numbers, without text.

    Args:
        batch: where they are.
        new_logprobs: [B, T] nats, without gradient.
        indices: which rows.
    """
    chosen = torch.tensor(indices, dtype=torch.int64, device=batch.input_ids.device)

    def lists(tensor: Tensor | None) -> list[Any]:
        return [None] * len(indices) if tensor is None else tensor[chosen].tolist()

    ids, advantages, rewards = lists(batch.input_ids), lists(batch.advantages), lists(batch.rewards)
    per_token = {
        name: lists(getattr(batch, name)) for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "loss_mask")
    }
    new = lists(new_logprobs)
    rows = []
    for place, index in enumerate(indices):
        start, count = batch.prompt_tokens[index], batch.completion_tokens[index]
        values: dict[str, Any] = {
            name: None if column[place] is None else tuple(column[place][:count]) for name, column in per_token.items()
        }
        row = TrainRow(
            prompt_ids=tuple(ids[place][:start]),
            completion_ids=tuple(ids[place][start : start + count]),
            advantage=advantages[place],
            reward=rewards[place],
            **values,
        )
        rows.append(RecordedRow(row=row, new_logprobs=tuple(new[place][:count])))
    return rows


def write_rows(path: Path, header: RowFileHeader, rows: Sequence[RecordedRow]) -> None:
    """Write a file whole or not at all; its folder is made.

    Raises:
        OSError: if it cannot be written.
    """
    lines = [json.dumps({"format": FORMAT, **dataclasses.asdict(header)})]
    for recorded in rows:
        fields = dataclasses.asdict(recorded)
        lines.append(json.dumps({**fields.pop("row"), **fields}))
    with named_when_whole(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_rows(path: Path) -> tuple[RowFileHeader, list[RecordedRow]]:
    """Return what a file holds.

    Raises:
        LockstepError: naming file and line, if it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LockstepError(f"--rows: cannot read {path}: {error}") from error
    if len(lines) < 2:
        raise LockstepError(f"--rows: {path} holds no rows; give a file of the folder non_finite of a run")
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_header(json.loads(line)) if number == 1 else _row(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise LockstepError(f"--rows: {path} line {number}: {what}") from error
    header, *rows = entries
    return header, rows  # type: ignore[return-value]


def _header(fields: dict[str, Any]) -> RowFileHeader:
    if (found := fields.pop("format", None)) != FORMAT:
        raise ValueError(f"format {found!r} is not {FORMAT!r}; give a file of the folder non_finite of a run")
    totals = fields["totals"]
    sums = None if totals["sums"] is None else StepSums(**totals["sums"])
    return RowFileHeader(**{**fields, "totals": StepTotals(**{**totals, "sums": sums})})


def _row(fields: dict[str, Any]) -> RecordedRow:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    own = {field.name: values.pop(field.name) for field in dataclasses.fields(RecordedRow) if field.name != "row"}
    row = TrainRow(**values)
    count = len(row.completion_ids)
    if not row.prompt_ids or not count:
        raise ValueError("a row needs a prompt and a completion")
    for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "loss_mask"):
        if (value := getattr(row, name)) is not None and len(value) != count:
            raise ValueError(f"{name} has {len(value)} values for {count} completion ids")
    if len(own["new_logprobs"]) != count:
        raise ValueError(f"new_logprobs has {len(own['new_logprobs'])} values for {count} completion ids")
    return RecordedRow(row=row, **own)
