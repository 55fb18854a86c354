"""The root of the errors that a user can mend."""


class LockstepError(Exception):
    """Something outside the code is wrong; the message says what, where and what to do."""
