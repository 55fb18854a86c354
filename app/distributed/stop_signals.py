"""Signals that request the end of the run: obeyed at once, or noted while a step is under way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from lightning.pytorch.utilities.rank_zero import rank_zero_only


class Stopped(SystemExit):
    """The run ends because a signal requested it.

    A SystemExit, so that no `except Exception` on the way takes it for a fault.
    """

    def __init__(self, line: str, status: int, agreed: bool = False) -> None:
        super().__init__(status)
        self.line = line
        """What a person should know."""
        self.agreed = agreed
        """Whether all ranks end for the same reason, so that one of them may report it for all."""


class StopSignals:
    """Handles the signals by which schedulers, launchers and people end a run.

    The handlers do as little as they can, because they run between any two instructions: outside the training loop
    they raise Stopped, inside it (`deferred`) they note the signal for the end of the optimiser step. There a further
    signal changes nothing, since launchers and schedulers repeat theirs; only Ctrl-C, once more, ends the run at once.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal noted while `deferred`."""
        self.deferred = False
        self.situation = ""
        """What follows `stopped by SIGTERM` in the line when a signal is obeyed at once."""

    @contextlib.contextmanager
    def handled(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Handle `signals` inside the block and put the former handlers back after it.

        One that the parent process made this one ignore (`nohup`, a shell's background job) stays ignored. Python
        handles signals in the main thread only; in another one this does nothing.
        """
        former = {}
        if threading.current_thread() is threading.main_thread():
            former = {number: signal.getsignal(number) for number in signals}
            former = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}
        try:
            for number in former:
                signal.signal(number, self._handle)
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def defer(self) -> None:
        """From now on note signals instead of obeying them at once."""
        self.deferred = True

    def obey(self, situation: str) -> None:
        """From now on obey signals at once, and one that has been noted now.

        Raises:
            Stopped: if one has been noted.
        """
        self.deferred, self.situation = False, situation
        if self.received is not None:
            self._stop(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.deferred:
            self._stop(signal.Signals(number))
        if self.received is None:
            self.received = signal.Signals(number)
            _report(f"\n{name}: the run is saved and ends after this optimiser step (Ctrl-C: at once, unsaved)\n")
        elif number == signal.SIGINT:
            self.situation = " at once, in the middle of a step"
            self._stop(signal.SIGINT)

    def _stop(self, number: signal.Signals) -> NoReturn:
        raise Stopped(f"stopped by {number.name}{self.situation}", status_of(number))


def status_of(number: signal.Signals) -> int:
    """Return the exit status by which shells and schedulers know a process that a signal ended: 128 + its number."""
    return 128 + number


def _report(text: str) -> None:
    """Write to stderr without its buffer, which the signal may have interrupted in the middle of a write."""
    if is_first_process():
        os.write(2, text.encode())


def is_first_process() -> bool:
    """Whether this process reports for all; known from the environment before there is a process group."""
    return getattr(rank_zero_only, "rank", 0) == 0


def slurm_job() -> str:
    """Return how `scontrol` names the SLURM job (or the task of a job array) of this process."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def requeue(job: str) -> str | None:
    """Request that SLURM runs `job` again; return why it refused, or None."""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        return f"scontrol: {error.strerror}"
    return None if done.returncode == 0 else (done.stderr.strip() or f"scontrol ended with {done.returncode}")


def started_again() -> bool:
    """Whether SLURM or torchrun (`--max-restarts`) runs the same command for the second time or more."""
    return any(os.environ.get(count, "0") != "0" for count in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
