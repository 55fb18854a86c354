"""Reward for mathematical answers, compared by value with the math-verify library."""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from app.rewards.builtin import CompletionForm, completion_text

Pair = tuple[str, str]


def math_verify(
    completions: Sequence[CompletionForm], answer: Sequence[Any], timeout_seconds: int = 5, **columns: Any
) -> list[float | None]:
    r"""1 where the completion's final answer equals the `answer` column as mathematics, else 0.

    The final answer is what math-verify extracts: a LaTeX expression (\boxed{} first) or a plain number. None where
    the answer is None or is no mathematics, as TRL's accuracy_reward does: bare words are no mathematics. Unlike
    TRL, an answer in LaTeX without dollar signs is accepted, and so is a plain number in the completion.

    Args:
        completions: see `app.rewards.builtin`.
        answer: expected answers; numbers or text, with or without $.
        timeout_seconds: limit for each parse and each comparison; what takes longer counts as not equal.
        columns: not used.

    Raises:
        ValueError: if timeout_seconds is under 1.
    """
    if timeout_seconds < 1:
        raise ValueError(f"timeout_seconds is {timeout_seconds}; it is at least 1")
    texts = [completion_text(completion) for completion in completions]
    known = [row for row, expected in enumerate(answer) if expected is not None]
    pairs = [(str(answer[row]), texts[row]) for row in known]
    # math-verify stops long computations by SIGALRM, which Python allows in a main thread only. From another thread
    # the work goes to the main thread of a helper process; without a time limit one answer could hang the run.
    if threading.current_thread() is threading.main_thread():
        scores = score_pairs(pairs, timeout_seconds)
    else:
        scores = _helper_process().submit(score_pairs, pairs, timeout_seconds).result()
    rewards: list[float | None] = [None] * len(texts)
    for row, score in zip(known, scores, strict=True):
        rewards[row] = score
    return rewards


def score_pairs(pairs: Sequence[Pair], timeout_seconds: int) -> list[float | None]:
    """Score (expected, completion) pairs. Main thread only."""
    from math_verify import parse, verify  # imported here: it loads sympy

    scores: list[float | None] = []
    for expected, text in pairs:
        gold = parse(expected, parsing_timeout=timeout_seconds)
        if not gold and not expected.replace(" ", "").isalpha():  # "yes" in dollars would be the product y·e·s
            gold = parse(f"${expected}$", parsing_timeout=timeout_seconds)
        if not gold:
            scores.append(None)
            continue
        found = parse(text, parsing_timeout=timeout_seconds)
        scores.append(float(verify(gold, found, timeout_seconds=timeout_seconds)))
    return scores


@functools.cache
def _helper_process() -> ProcessPoolExecutor:
    """One process for the run, spawned: a fork would copy the trainer's threads and its CUDA state."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
