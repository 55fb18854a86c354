"""Built-in reward functions, with TRL's signature: (prompts, completions, completion_ids, **columns) -> rewards.

Completions are strings for text prompts and [{"role": "assistant", "content": text}] for chat prompts. A column
arrives as a list with one value per completion. None in the result: the function does not apply to that row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

CompletionForm = str | list[dict[str, str]]


def completion_text(completion: CompletionForm) -> str:
    """The text of a completion in either form."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def exact_match(
    completions: Sequence[CompletionForm], answer: Sequence[Any], pattern: str | None = None, **columns: Any
) -> list[float | None]:
    """1 where the stripped completion equals the stripped `answer` column, else 0; None where the answer is None.

    Args:
        completions: see the module.
        answer: expected text; a number is compared as `str` writes it.
        pattern: regular expression that finds the answer in the completion (dot matches newlines). The last match
            counts, its first group if it has one. No match: 0.
        columns: not used.
    """
    finder = None if pattern is None else re.compile(pattern, re.DOTALL)
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        found: str | None = completion_text(completion)
        if finder is not None:
            matches = list(finder.finditer(completion_text(completion)))
            found = matches[-1].group(1 if finder.groups else 0) if matches else None
        if expected is None:
            rewards.append(None)
        else:
            rewards.append(float(found is not None and found.strip() == str(expected).strip()))
    return rewards


def format_regex(
    completions: Sequence[CompletionForm],
    pattern: str,
    mode: Literal["fullmatch", "search"] = "fullmatch",
    **columns: Any,
) -> list[float]:
    """1 where the completion matches `pattern` (dot matches newlines), else 0.

    Args:
        completions: see the module.
        pattern: regular expression.
        mode: "fullmatch": the whole completion matches. "search": some part of it does.
        columns: not used.
    """
    if mode not in ("fullmatch", "search"):
        raise ValueError(f"mode is {mode!r}; it is fullmatch or search")
    match = getattr(re.compile(pattern, re.DOTALL), mode)
    return [float(match(completion_text(completion)) is not None) for completion in completions]


def length(completion_ids: Sequence[Sequence[int]], max_tokens: int, buffer_tokens: int, **columns: Any) -> list[float]:
    """Soft overlong punishment, DAPO eq. 13 (https://arxiv.org/abs/2503.14476), as TRL's.

    With n tokens: 0 for n <= max - buffer; (max - buffer - n) / buffer up to n = max; -1 beyond. It only takes
    away: short completions gain nothing.

    Args:
        completion_ids: the sampled ids, the end-of-sequence id included.
        max_tokens: length from which the punishment is -1; at most the sampling's max_tokens, or it never applies.
        buffer_tokens: width of the linear part, 1 to max_tokens.
        columns: not used.

    Raises:
        ValueError: if buffer_tokens is outside 1 .. max_tokens.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens is {buffer_tokens}; it is 1 to max_tokens = {max_tokens}")
    free = max_tokens - buffer_tokens
    return [min(0.0, max(-1.0, (free - len(ids)) / buffer_tokens)) for ids in completion_ids]
