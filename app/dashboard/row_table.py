"""Rows as tables for a person: CSV files and what they name."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

WORST_TOKENS = 5
"""Tokens of a row that are named, those of the largest difference."""


def append_csv(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Append rows to a CSV file, with a header if it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
