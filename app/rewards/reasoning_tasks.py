"""Reward for reasoning-gym tasks: each task's own `score_answer`."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from app.rewards.builtin import CompletionForm, completion_text


def reasoning_gym(
    completions: Sequence[CompletionForm],
    reasoning_gym_entry: Sequence[Mapping[str, Any] | None],
    tag: str | None = "answer",
    **columns: Any,
) -> list[float | None]:
    """The task's own score, 0 to 1, of the answer in each completion; None where the row is no reasoning-gym row.

    Several tasks score in part: arithmetic gives len(answer) / len(text) to text that contains the answer.

    Args:
        completions: see `app.rewards.builtin`.
        reasoning_gym_entry: written by the source `reasoning_gym/<task>`.
        tag: the answer is what the last <tag>...</tag> holds (the library's convention; ask for it in the prompt).
            None: the whole completion, stripped.
        columns: not used.
    """
    from reasoning_gym.utils import extract_answer  # imported here: it takes two seconds

    rewards: list[float | None] = []
    for completion, entry in zip(completions, reasoning_gym_entry, strict=True):
        if entry is None:
            rewards.append(None)
            continue
        text = completion_text(completion)
        found = text.strip() if tag is None else extract_answer(text, tag_name=tag)
        rewards.append(_score(entry, found))
    return rewards


def _score(entry: Mapping[str, Any], found: str | None) -> float:
    """Score one answer. Some tasks' scorers raise on text they cannot read: that is a wrong answer, with a warning."""
    task = _task(entry["task"], pickle.dumps(entry["options"]))
    try:
        return float(task.score_answer(found, dict(entry)))
    except Exception as error:  # any: the scorers parse the model's text in a hundred ways
        warnings.warn(
            f"reasoning_gym/{entry['task']}: its scorer raises {type(error).__name__}; scored 0", stacklevel=2
        )
        return 0.0


@functools.cache
def _task(name: str, options: bytes) -> Any:
    """The data set whose scorer is asked. It gets the options: some scorers, as decimal_arithmetic's, read them.

    They come pickled, so that any option value (a date, a list) can be part of the cache's key.
    """
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, **pickle.loads(options))
