"""A time-out for work that should make progress: an exception first, then the end of the process."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
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
    """

    def __init__(self, seconds: float | None, what: str, grace: float | None = None) -> None:
        self.seconds = seconds
        self.what = what
        self.grace = GRACE_SECONDS if grace is None else grace
        self._last = math.inf
        self._over = threading.Event()
        self._sending = threading.Lock()

    def beat(self) -> None:
        """Record that there was progress."""
        self._last = time.monotonic()

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
        self._last = math.inf
        if self.seconds is None:
            return
        self._over.set()
        with self._sending:  # no signal is sent after this
            pass
        # None: the handler was not set from Python and cannot be restored from it.
        signal.signal(SIGNAL, signal.SIG_DFL if self._previous is None else self._previous)

    def _stalled(self) -> bool:
        assert self.seconds is not None
        return time.monotonic() - self._last >= self.seconds

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        # Otherwise the work returned before the signal came. An exception in __exit__ would leave the watchdog armed.
        if self._stalled() and (frame is None or frame.f_code is not Watchdog.__exit__.__code__):
            raise Stalled(f"{self.what} made no progress for {self.seconds:g} s (in {place(frame)})")

    def _watch(self) -> None:
        assert self.seconds is not None
        main = threading.main_thread().ident
        assert main is not None
        while not self._over.wait(min(self._last + self.seconds - time.monotonic(), threading.TIMEOUT_MAX)):
            with self._sending:
                if not self._stalled():
                    continue
                signal.pthread_kill(main, SIGNAL)
            if not self._over.wait(self.grace) and self._stalled():
                self._end(main)

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
