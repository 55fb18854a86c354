"""Rows as tables for a person: a CSV file that grows, and the same on TensorBoard's text tab."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from app.types import TrainRow

LONGEST_CELL = 400
"""Most characters of a cell of a Markdown table."""
WORST_TOKENS = 5
"""Tokens of a row that are named, those of the largest difference."""


def by_size(difference: float) -> float:
    """Rank differences by their size; a missing one (NaN) comes last."""
    return abs(difference) if difference == difference else 0.0


def named_tokens(
    row: TrainRow,
    differences: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    rank: Callable[[float], float] = by_size,
) -> str:
    """Return the sampled tokens of largest difference with it, e.g. "'7' +0.5, ' a' -0.1".

    Args:
        row: the row.
        differences: per sampled token, nats.
        tokenizer: decodes the tokens.
        rank: what a difference is ranked by, the largest first.
    """
    pairs = sorted(zip(differences, row.sampled_ids, strict=True), key=lambda pair: rank(pair[0]), reverse=True)
    return ", ".join(f"{tokenizer.decode([token])!r} {value:+.3g}" for value, token in pairs[:WORST_TOKENS])


def row_text(row: TrainRow, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the decoded row by column: what stands before the first sampled token, and the rest."""
    return {
        "prompt": str(tokenizer.decode(list(row.prompt_ids))),
        "completion": str(tokenizer.decode(list(row.completion_ids))),
    }


def append_csv(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Append rows to a CSV file, with a header if it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def write_table(
    path: Path, rows: Sequence[dict[str, str]], loggers: Iterable[Any], tag: str, step: int, heading: str = ""
) -> None:
    """Append rows to a CSV file and show them on TensorBoard; a file that cannot be written ends nothing.

    Args:
        path: of the CSV file.
        rows: cells by column; at least one row.
        loggers: of the Trainer.
        tag: on TensorBoard's text tab.
        step: optimiser steps done.
        heading: a line above the table on TensorBoard.
    """
    try:
        append_csv(path, rows)
    except OSError as error:  # a full disk should not end the run for a table
        rank_zero_warn(f"{path}: cannot write ({error.strerror}); rows are lost")
    text = markdown_table(list(rows[0]), [list(row.values()) for row in rows])
    add_text(loggers, tag, f"{heading}\n\n{text}" if heading else text, step)


def add_text(loggers: Iterable[Logger], tag: str, text: str, step: int) -> None:
    """Show a text on TensorBoard, if it is among the loggers."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, text, step)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; long cells are cut, pipes and line breaks are kept from breaking it."""
    lines = [list(head), ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    cut = text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + "…"
    return cut.replace("|", "\\|").replace("\n", "<br>")
