"""The error of the data room."""

from app.errors import LockstepError


class DataError(LockstepError, ValueError):
    """The prompt data cannot be used. The message is one line: where (file and row), what is wrong, what to do."""
