"""Clocks that go as a test says, for watchdogs whose limits no slow machine can reach."""

from __future__ import annotations

import threading
from collections.abc import Callable

from app.engine.watchdog import Clock


class StandingClock(Clock):
    """Stands still. Whoever hangs moves `time` on; or `hung` says that somebody does, and all waits are over."""

    def __init__(self, hung: Callable[[], bool] = lambda: False) -> None:
        self.time = 0.0
        self.hung = hung

    def now(self) -> float:
        """Return what it shows."""
        return self.time

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Look again and again at the event and at `time`, which another thread may move."""
        end = self.time + seconds
        while self.time < end:
            if event.wait(0.005):
                return True
            if self.hung():
                self.time = end
        return event.is_set()


class ScriptedClock(Clock):
    """Moves in waits only, at once: what is to happen at some moment happens when a wait reaches it."""

    def __init__(self, *script: tuple[float, Callable[[], object]]) -> None:
        self.time = 0.0
        self.script = list(script)

    def now(self) -> float:
        """Return what it shows."""
        return self.time

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Let happen what falls into the wait, until the event is set."""
        end = self.time + seconds
        while not event.is_set() and self.script and self.script[0][0] <= end:
            self.time, happens = self.script.pop(0)
            happens()
        if event.is_set():
            return True
        assert end < float("inf"), "nothing ends this wait"
        self.time = end
        return False
