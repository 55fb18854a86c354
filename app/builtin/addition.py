"""The built-in task lockstep/addition: two-digit sums that carry, for runs that need no download."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, Literal, get_args

from app.errors import DataError

Part = Literal["train", "validation", "warm_up_stop"]
SPLITS = ("train", "validation")
PROMPT = "{left}+{right}="
SMALLEST, LARGEST = 10, 99
"""Both terms lie between these, so every prompt has the same length."""
PARTS_OF_TEN: dict[int, Part] = {0: "validation", 1: "warm_up_stop"}
"""Which tenths of the pairs are held out; all others are for training."""


def rows(split: str) -> list[dict[str, Any]]:
    """All rows of a split, in a fixed shuffled order, so that the first n are a fair sample.

    A row is {"id": "37+85", "prompt": [{"role": "user", "content": "37+85="}], "answer": "122"}. A pair and its
    swapped form are always in the same split: no validation sum was trained on in the other order.

    Raises:
        DataError: for a split other than train and validation.
    """
    if split not in SPLITS:
        raise DataError(f"lockstep/addition: split {split!r}; it is one of {', '.join(SPLITS)}")
    return [row(left, right) for left, right in pairs("train" if split == "train" else "validation")]


def row(left: int, right: int) -> dict[str, Any]:
    """The row that asks for `left` + `right`."""
    return {
        "id": f"{left}+{right}",
        "prompt": [{"role": "user", "content": PROMPT.format(left=left, right=right)}],
        "answer": str(left + right),
    }


@cache
def pairs(part: Part) -> tuple[tuple[int, int], ...]:
    """The (left, right) pairs of a part, in a fixed shuffled order.

    `warm_up_stop` decides when the built-in model has been warmed up enough: it is kept apart from both splits, so
    that the validation split plays no role in making the model.

    Raises:
        ValueError: for an unknown part.
    """
    if part not in get_args(Part):
        raise ValueError(f"part {part!r}; it is one of {', '.join(get_args(Part))}")
    terms = range(SMALLEST, LARGEST + 1)
    carrying = [(left, right) for left in terms for right in terms if carries(left, right)]
    chosen = [(left, right) for left, right in carrying if _part_of(left, right) == part]
    return tuple(sorted(chosen, key=lambda pair: _digest(*pair)))


def carries(left: int, right: int) -> bool:
    """Whether the ones or the tens of `left` + `right` add up to ten or more."""
    return left % 10 + right % 10 >= 10 or left // 10 + right // 10 >= 10


def careless_sum(left: int, right: int) -> int:
    """`left` + `right` with the carry from the ones forgotten: 37 + 85 = 112."""
    return (left // 10 + right // 10) * 10 + (left + right) % 10


def _part_of(left: int, right: int) -> Part:
    """The part of an unordered pair, by a hash: no random generator whose draws could change between versions."""
    return PARTS_OF_TEN.get(_digest(min(left, right), max(left, right)) % 10, "train")


def _digest(left: int, right: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{left}+{right}".encode()).digest()[:8], "big")
