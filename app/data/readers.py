"""One reader per kind of prompt source. Each yields `(place, row)`: the place names the row in messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.errors import DataError, first_line

Row = dict[str, Any]
PlacedRows = Iterator[tuple[str, Row]]

REASONING_GYM_SPLITS = ("train", "validation", "test")
REASONING_GYM_STRIDE = 1_000_000
"""Most rows of a reasoning-gym split. Seeds of two splits lie at least this far apart (see `read_reasoning_gym`)."""


def read_jsonl(path: Path) -> PlacedRows:
    """Yield the objects of a UTF-8 file with one JSON object per line. Blank lines are skipped.

    Raises:
        DataError: naming the line, if it is not UTF-8, not JSON or not an object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = json.loads(text.rstrip())
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not UTF-8 text (byte {error.start + 1}); save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{place}: broken JSON ({error.msg}, column {error.colno}); write one JSON object per line"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{place}: a JSON {type(row).__name__}; write one JSON object {{...}} per line")
            yield place, row


def read_parquet(path: Path) -> PlacedRows:
    """Yield the rows of a Parquet file. Raises DataError if the file is not Parquet."""
    import pyarrow  # imported here: a run on JSONL needs no pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {first_line(error)}") from error


def read_reasoning_gym(task: str, split: str, limit: int | None, options: Mapping[str, Any]) -> PlacedRows:
    """Yield rows of a reasoning-gym task: `prompt`, `answer` and `reasoning_gym_entry` for its own scorer.

    reasoning-gym draws row i of a data set from `Random(seed + i)`, so neighbouring seeds share all rows but one.
    The splits therefore get seeds `REASONING_GYM_STRIDE` apart: split s of `options.seed` k (default 0) starts at
    `(3 k + s) * REASONING_GYM_STRIDE`. A task with few possible questions can still repeat one.

    Args:
        task: name of the task, such as `chain_sum`.
        split: one of `REASONING_GYM_SPLITS`.
        limit: number of rows where `options` has no `size`; without both, the task's default.
        options: the task's settings, with `size` and `seed`.

    Raises:
        DataError: for an unknown task, split or option, or a size above the stride.
    """
    import reasoning_gym  # imported here: it takes two seconds
    from reasoning_gym.factory import DATASETS

    place = f"reasoning_gym/{task}"
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.0)
        raise DataError(f"{place}: no such task in reasoning-gym; closest names: {', '.join(near)}")
    if split not in REASONING_GYM_SPLITS:
        raise DataError(f"{place}: split {split!r} is unknown; it is one of {', '.join(REASONING_GYM_SPLITS)}")
    settings = dict(options)
    seed = settings.pop("seed", 0)
    size = settings.pop("size", limit)
    if not isinstance(seed, int) or seed < 0:
        raise DataError(f"{place}: options.seed is {seed!r}; it is an integer from 0")
    start = (len(REASONING_GYM_SPLITS) * seed + REASONING_GYM_SPLITS.index(split)) * REASONING_GYM_STRIDE
    try:
        dataset = reasoning_gym.create_dataset(task, seed=start, **settings, **({} if size is None else {"size": size}))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{place}: options refused by the task: {first_line(error)}") from error
    if len(dataset) > REASONING_GYM_STRIDE:
        raise DataError(f"{place}: options.size is {len(dataset)}; at most {REASONING_GYM_STRIDE}")
    for number in range(len(dataset)):
        entry = dataset[number]
        row = {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "reasoning_gym_entry": {"task": task, "options": settings, **entry},
        }
        yield f"{place} row {number}", row


def read_huggingface(path: str, name: str | None, split: str) -> PlacedRows:
    """Yield the rows of a Hugging Face dataset, by Hub name or local folder (`datasets.load_dataset`).

    Raises:
        DataError: if it is not found, cannot be reached, or has no such configuration or split.
    """
    import datasets  # imported here: it takes over a second
    from datasets.exceptions import DatasetsError

    try:
        dataset = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        if Path(path).is_dir():
            raise DataError(f"{path}: the folder does not load as a dataset: {first_line(error)}") from error
        raise DataError(
            f"{path}: no such folder here ({Path.cwd()}), and no Hugging Face dataset that loads: {first_line(error)} "
            "(offline: give the path of a local file or folder)"
        ) from error
    for number, row in enumerate(dataset):
        yield f"{path} row {number}", row
