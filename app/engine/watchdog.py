"""A time-out for work that should make progress: an exception first, then the end of the process."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from app.engine.errors import EngineError
from app.world import World

GRACE_SECONDS = 60.0
"""Seconds that interrupted work has to return before the process is ended."""
SIGNAL = signal.SIGURG
"""Interrupts the main thread. Ignored by default, so a late one does no harm; Lightning and schedulers use SIGTERM and
SIGUSR1/2, test runners SIGALRM."""


class Stalled(BaseException):
    """No progress for too long. A BaseException, so that no `except Exception` in the interrupted code swallows it."""


class Clock:
    """Time as a watchdog sees it; tests put their own in its place."""

    def now(self) -> float:
        """Return the seconds since some moment."""
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait at most `seconds` for the event and return whether it is set."""
        return event.wait(min(seconds, threading.TIMEOUT_MAX))


CLOCK = Clock()
"""What a watchdog goes by that is given no other."""


class Patience:
    """When work counts as stalled, and what is done about it: by a clock alone, without signals and processes.

    Args:
        seconds: longest time between two beats.
        grace: seconds between the interruption and the end.
        clock: measures them.
    """

    def __init__(self, seconds: float, grace: float, clock: Clock) -> None:
        self.seconds = seconds
        self.grace = grace
        self.clock = clock
        self.last = math.inf
        """Moment of the last beat; infinity while none is awaited."""
        self._over = threading.Event()
        self._interrupting = threading.Lock()

    def beat(self) -> None:
        """Record that there was progress."""
        self.last = self.clock.now()

    @property
    def left(self) -> float:
        """Seconds until the work counts as stalled."""
        return self.last + self.seconds - self.clock.now()

    @property
    def stalled(self) -> bool:
        """Whether the last beat was too long ago."""
        return self.left <= 0

    def stop(self) -> None:
        """End `watch`; after this it interrupts nothing."""
        self._over.set()
        with self._interrupting:
            pass

    def watch(self, interrupt: Callable[[], None], end: Callable[[], None]) -> None:
        """Call `interrupt` whenever the work stalls, and `end` if there was no beat in the grace after it."""
        while not self.clock.wait(self._over, self.left):
            with self._interrupting:
                if not self.stalled:
                    continue
                interrupt()
            if not self.clock.wait(self._over, self.grace) and self.stalled:
                end()
                return


class Watchdog:
    """Watches the work inside its `with` block, which must call `beat` whenever it made progress.

    After `seconds` without a beat a signal interrupts the main thread, which raises Stalled. That ends Python code and
    waits that a signal can break (sleep, locks, input). Code stuck in native calls does not return: `grace` seconds
    later one line goes to stderr and the process ends with status 1, so that the other ranks and the scheduler see a
    dead process instead of waiting for ever. Native code that also holds the interpreter lock stops the watchdog's
    thread as well, and nothing is ended.

    Args:
        seconds: longest time between two beats; None: nothing is watched.
        what: name of the work in messages.
        grace: seconds between the interruption and the end of the process.
        clock: measures both; the machine's if None.
    """

    def __init__(
        self, seconds: float | None, what: str, grace: float | None = None, clock: Clock | None = None
    ) -> None:
        self.seconds = seconds
        self.what = what
        self.grace = GRACE_SECONDS if grace is None else grace
        self._patience = Patience(math.inf if seconds is None else seconds, self.grace, clock or CLOCK)

    def beat(self) -> None:
        """Record that there was progress."""
        self._patience.beat()

    def __enter__(self) -> Watchdog:
        """Start watching.

        Raises:
            EngineError: outside the main thread, the only one that a signal handler can interrupt.
        """
        self.beat()
        if self.seconds is None:
            return self
        if threading.current_thread() is not threading.main_thread():
            raise EngineError(
                f"{self.what} can be watched in the main thread only; set data.engine.stall_timeout: null to run it "
                f"unwatched in another"
            )
        self._previous = signal.signal(SIGNAL, self._interrupt)
        self._thread = threading.Thread(target=self._watch, name="lockstep-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Stop watching and restore the signal's handler."""
        self._patience.last = math.inf
        if self.seconds is None:
            return
        self._patience.stop()
        # None: the handler was not set from Python and cannot be restored from it.
        signal.signal(SIGNAL, signal.SIG_DFL if self._previous is None else self._previous)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        # Otherwise the work returned before the signal came. An exception in __exit__ would leave the watchdog armed.
        if self._patience.stalled and (frame is None or frame.f_code is not Watchdog.__exit__.__code__):
            raise Stalled(f"{self.what} made no progress for {self.seconds:g} s (in {place(frame)})")

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        self._patience.watch(lambda: signal.pthread_kill(main, SIGNAL), lambda: self._end(main))

    def _end(self, main: int) -> None:
        line = (
            f"rank {World().rank}: {self.what} made no progress for {self.seconds:g} s and could not be interrupted "
            f"for another {self.grace:g} s (in {place(sys._current_frames().get(main))}): ending this process with "
            f"status 1; go on from the last checkpoint with --ckpt_path last\n"
        )
        os.write(2, line.encode())  # sys.stderr's lock may be held by the thread that is stuck
        os._exit(1)


def place(frame: FrameType | None) -> str:
    """Return function, file and line of a frame: the innermost Python code that runs."""
    if frame is None:
        return "unknown place"
    return f"{frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"
