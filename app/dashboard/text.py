"""Tables for TensorBoard's text tab."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_CELL = 400
"""Most characters of a cell."""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; long cells are cut, pipes and line breaks are kept from breaking it."""
    lines = [list(head), ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    cut = text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + "…"
    return cut.replace("|", "\\|").replace("\n", "<br>")
