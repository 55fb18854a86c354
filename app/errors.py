"""The root of the errors that a user can mend."""


class LockstepError(Exception):
    """Something outside the code is wrong; the message says what, where and what to do."""


class DataError(LockstepError, ValueError):
    """The prompt data cannot be used. The message is one line: where (file and row), what is wrong, what to do."""


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message, for use inside a one-line message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
