"""Prompt sources: where rows come from, and the checks every row passes before a run starts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from app.data.readers import (
    PlacedRows,
    Row,
    read_huggingface,
    read_jsonl,
    read_parquet,
    read_reasoning_gym,
)
from app.errors import DataError

__all__ = ["DataError", "PromptSource", "load_rows"]

JSON_SUFFIXES = (".jsonl", ".json")
ADDITION = "lockstep/addition"
REASONING_GYM = "reasoning_gym/"
ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
"""Argument names of a reward function: a column of that name could not be handed over."""


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Where prompts come from. Each row has a `prompt`: text, or chat messages [{role, content}, ...]."""

    path: str
    """A .jsonl or .json file (one JSON object per line), a .parquet file, reasoning_gym/<task>,
    lockstep/addition, a folder, or the name of a Hugging Face dataset."""
    split: str = "train"
    """Split of a generated task (train, validation, test), a folder or a Hugging Face dataset. A file has none."""
    name: str | None = None
    """Configuration (subset) of a Hugging Face dataset."""
    limit: int | None = None
    """Use the first rows only. None: all."""
    rename: dict[str, str] = field(default_factory=dict)
    """Columns to rename, old: new. {question: prompt} makes `question` the prompt."""
    chat: bool = False
    """Turn a text prompt into a chat of one user message, so that the chat template applies."""
    system_prompt: str | None = None
    """System message put before the prompt, which becomes a chat if it is text."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a reasoning_gym task, such as size, seed, min_terms."""


def load_rows(source: PromptSource) -> list[Row]:
    """Read and check the rows of a source. Every row gets every column; None where it had none.

    Raises:
        DataError: in one line naming file and row (line number for JSONL, else row from 0), for a missing or empty
            source, a broken line, a missing or empty prompt, a wrong prompt type, a bad message, a repeated `id`
            or a column named as an argument of the rewards.
    """
    _check_settings(source)
    places: list[str] = []
    rows: list[Row] = []
    for place, raw in islice(_read(source), source.limit):
        row = {source.rename.get(column, column): value for column, value in raw.items()}
        if len(row) < len(raw):
            raise DataError(f"{place}: rename gives two columns one name; columns: {', '.join(raw)}")
        for column in RESERVED_COLUMNS:
            if column in row:
                raise DataError(f"{place}: column {column!r} has the name of a reward argument; use `rename`")
        row["prompt"] = _check_prompt(row, place, source)
        places.append(place)
        rows.append(row)
    if not rows:
        raise DataError(f"{source.path}: no rows; it needs at least one with a `prompt`")
    _check_ids(rows, places)
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{**columns, **row} for row in rows]


def _check_settings(source: PromptSource) -> None:
    """Refuse settings that would do nothing, rather than ignore them."""
    if source.limit is not None and source.limit < 1:
        raise DataError(f"{source.path}: limit is {source.limit}; it is at least 1, or null for all rows")
    if source.options and not source.path.startswith(REASONING_GYM):
        raise DataError(f"{source.path}: `options` are for {REASONING_GYM}<task> only; remove them")
    generated = source.path == ADDITION or source.path.startswith(REASONING_GYM)
    if source.name is not None and (generated or Path(source.path).suffix in (*JSON_SUFFIXES, ".parquet")):
        raise DataError(f"{source.path}: `name` is for Hugging Face datasets only; remove it")


def _read(source: PromptSource) -> PlacedRows:
    """Choose the reader by the path."""
    path = Path(source.path)
    if source.path == ADDITION:
        return _read_addition(source.split)
    if source.path.startswith(REASONING_GYM):
        task = source.path.removeprefix(REASONING_GYM)
        return read_reasoning_gym(task, source.split, source.limit, source.options)
    if path.suffix in (*JSON_SUFFIXES, ".parquet"):
        if not path.is_file():
            raise DataError(f"{path}: no such file (working folder: {Path.cwd()})")
        return read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path)
    if path.is_file():
        raise DataError(
            f"{path}: a {path.suffix or 'nameless'} file; use .jsonl, .json (one object per line) or .parquet"
        )
    return read_huggingface(source.path, source.name, source.split)


def _read_addition(split: str) -> Iterator[tuple[str, Row]]:
    from app.builtin.addition import rows  # imported here: the built-in task is needed by few runs

    for number, row in enumerate(rows(split)):
        yield f"{ADDITION} row {number}", row


def _check_prompt(row: Row, place: str, source: PromptSource) -> str | list[dict[str, str]]:
    """Return the row's prompt, with the system prompt put before it. Raises DataError if it is not usable."""
    if "prompt" not in row:
        raise DataError(f"{place}: no `prompt` column; columns: {', '.join(row) or 'none'} (see `rename`)")
    prompt = row["prompt"]
    system = [] if source.system_prompt is None else [{"role": "system", "content": source.system_prompt}]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{place}: the prompt is empty")
        return [*system, {"role": "user", "content": prompt}] if source.chat or system else prompt
    if not isinstance(prompt, list):
        raise DataError(f"{place}: the prompt is {_kind(prompt)}; it is text or a list of {{role, content}} messages")
    if not prompt:
        raise DataError(f"{place}: the prompt is empty (no messages)")
    messages = [_check_message(message, f"{place}: message {index}") for index, message in enumerate(prompt)]
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{place}: the last message is the assistant's; end with a message it can answer")
    if system and messages[0]["role"] in ("system", "developer"):
        raise DataError(f"{place}: the chat has a system message of its own; remove `system_prompt`")
    return system + messages


def _check_message(message: object, place: str) -> dict[str, str]:
    """Return the message without None fields, which Arrow adds where another row has the field."""
    if not isinstance(message, dict):
        raise DataError(f"{place} is {_kind(message)}; it is an object with `role` and `content`")
    kept = {key: value for key, value in message.items() if value is not None}
    if kept.get("role") not in ROLES:
        raise DataError(f"{place} has role {kept.get('role')!r}; it is one of {', '.join(ROLES)}")
    for key, value in kept.items():
        if not isinstance(value, str):
            raise DataError(f"{place} has a `{key}` that is {_kind(value)}; it must be text")
    content = kept.get("content")
    if content is None or (not content.strip() and kept["role"] != "system"):
        raise DataError(f"{place} ({kept['role']}) has no content")
    return kept


def _check_ids(rows: list[Row], places: list[str]) -> None:
    """Refuse a repeated `id`: two rows under one name usually mean that files were joined twice."""
    first: dict[str, str] = {}
    for row, place in zip(rows, places, strict=True):
        if row.get("id") is None:
            continue
        key = repr(row["id"])
        if key in first:
            raise DataError(f"{place}: id {key} is already used at {first[key]}; ids must differ")
        first[key] = place


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
