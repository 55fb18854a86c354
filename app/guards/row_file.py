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

from torch import Tensor

from app.checkpoint.files import named_when_whole
from app.data.collate import sampled_values, uncollate
from app.errors import LockstepError
from app.types import StepSums, StepTotals, TrainBatch, TrainRow

FORMAT = "lockstep-rows-2"
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
    """Of the step, before clipping. None: under 16-bit mixed precision, where an overflow is expected."""
    correctable: bool
    """Whether every row of the rollout, on every rank, came with the engine's log-probabilities."""
    totals: StepTotals
    """Of the whole optimiser step: the loss is normalised by it."""
    rows_on_rank: int
    """Rows of the step on this rank; the file may hold fewer."""
    settings: Mapping[str, Any]
    """By its key of the configuration, what the loss depends on (see `GRPOModule.loss_settings`)."""


@dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """A row of the file."""

    row: TrainRow
    """The row as it was trained on."""
    new_logprobs: tuple[float, ...]
    """Per sampled token, nats: the log-probability that the policy gave at the time."""
    prompt: str | None = None
    """The decoded tokens before the first sampled one. None: there was no tokenizer."""
    completion: str | None = None
    """The decoded tokens from the first sampled one on. None: there was no tokenizer."""


def recorded_rows(batch: TrainBatch, new_logprobs: Tensor, indices: Sequence[int]) -> list[RecordedRow]:
    """Return some rows of a batch for a file, without text.

    Args:
        batch: the batch that holds them.
        new_logprobs: [B, T] nats, without gradient.
        indices: which of its B rows.
    """
    return [
        RecordedRow(row=row, new_logprobs=new)
        for row, new in zip(uncollate(batch, indices), sampled_values(new_logprobs, batch, indices), strict=True)
    ]


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
        if str(found).startswith(FORMAT.rstrip("0123456789")):
            raise ValueError(
                f"format {found!r} is of another version of Lockstep, which reads it; this one reads {FORMAT!r}"
            )
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
    if len(own["new_logprobs"]) != row.sampled_count:
        raise ValueError(f"new_logprobs has {len(own['new_logprobs'])} values for {row.sampled_count} sampled tokens")
    return RecordedRow(row=row, **own)
