"""The root of the errors that a user can mend."""


class LockstepError(Exception):
    """Something outside the code is wrong; the message says what, where and what to do."""


class DataError(LockstepError, ValueError):
    """The prompt data cannot be used. The message is one line: where (file and row), what is wrong, what to do."""
