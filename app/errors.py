"""The root of the errors that a user can fix."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class LockstepError(Exception):
    """Something outside the code is wrong; the message says what, where and what to do."""


class DataError(LockstepError, ValueError):
    """The prompt data cannot be used. The message is one line: where (file and row), what is wrong, what to do."""


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message, for use inside a one-line message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what led to it, the latest first, each once."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        yield link
        seen.append(link)
        link = link.__cause__ or link.__context__


SHOWN = 8
"""Names written out in a message; the rest is counted."""


def listed(names: Collection[str]) -> str:
    """Return the names, comma-separated; after the first few only how many more there are."""
    shown = ", ".join(list(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
