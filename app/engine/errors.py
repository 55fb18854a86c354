"""Errors that an engine raises."""

from __future__ import annotations

from app.errors import LockstepError


class EngineError(LockstepError, RuntimeError):
    """The engine cannot carry out a call; the message says what to change."""


class EngineFailure(EngineError):
    """The engine died, hung or broke off its work: after `restart` the same call may succeed."""


class RequestError(LockstepError, ValueError):
    """The engine cannot process a prompt; the message names the request."""
