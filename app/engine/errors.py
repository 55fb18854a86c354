"""What an engine answers when it cannot do what was asked."""

from __future__ import annotations

from app.errors import LockstepError


class EngineError(LockstepError, RuntimeError):
    """The engine cannot do what was asked; the message says what to change."""


class EngineFailure(EngineError):
    """The engine is dead, hung or broke off its work: `restart` may mend it, and the same call may then succeed."""


class RequestError(LockstepError, ValueError):
    """A prompt that the engine cannot take; the message names the request."""
