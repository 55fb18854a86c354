"""A failed engine is started anew and its work repeated, on all ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

from app.engine.errors import EngineError, EngineFailure
from app.engine.protocol import Engine
from app.world import World

T = TypeVar("T")


class WeightSender(Protocol):
    """Sends the weights that the trainer has now to this rank's engine."""

    def send(self) -> object:
        """Send them. All ranks must call it together.

        Raises:
            EngineFailure: on all ranks, if the engine of one failed and may be started again.
        """


class EngineRecovery:
    """Runs work that uses the engine, and repeats it on the ranks whose engine failed.

    Completions are seeded by row, so repeated work gives the rows that undisturbed work would have given.

    Args:
        engine: this rank's engine.
        world: the ranks, each of which has an engine.
        max_restarts: restarts in a row, over all ranks, before the run is ended; 0 never restarts. Work that
            succeeds at once ends the row.

    Raises:
        ValueError: if `max_restarts` is negative.
    """

    def __init__(self, engine: Engine, world: World, max_restarts: int = 3) -> None:
        if max_restarts < 0:
            raise ValueError(f"data.max_engine_restarts={max_restarts}: must be 0 or more")
        self.engine = engine
        self.world = world
        self.max_restarts = max_restarts
        self.restarts = 0
        """Restarts in a row up to now."""
        self._sender: WeightSender | None = None

    def connect(self, sender: WeightSender) -> None:
        """From now on let `sender` send the weights to engines that were started anew."""
        self._sender = sender

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. All ranks must call it together; `work` itself may not wait for other ranks.

        Raises:
            Exception: this rank's own error, if no restart can help.
            EngineError: such an error of another rank, with its rank and message; if an engine failed more often
                than `max_restarts` in a row; if it cannot be started again; or if no sender is connected.
        """
        results: list[T] = []  # this rank's, once it has one

        def attempt() -> str | None:
            if not results:
                try:
                    results.append(work())
                except EngineFailure as error:
                    return str(error)
            return None

        failures = self._failures(attempt)
        if not failures:
            self.restarts = 0
        while failures:
            self._start_anew(failures)
            failures = self._failures(attempt)
        return results[0]

    def repeat(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; while it raises an EngineFailure, restart the engines and call it again.

        All ranks must call it together, and an EngineFailure must be one on all ranks, as with `WeightSender.send`.
        Nothing is sent to the restarted engines: `work` itself sends the weights.

        Raises:
            Exception: any other error of `work`.
            EngineError: if an engine failed more often than `max_restarts` in a row, or cannot be started again.
        """
        while True:
            try:
                return work()
            except EngineFailure as error:
                self._restart(str(error))

    def _failures(self, attempt: Callable[[], str | None]) -> dict[int, str]:
        """Return the messages of the ranks whose engine failed in `attempt`, on every rank."""
        messages = self.world.gather(self.world.together(attempt, EngineError))
        return {rank: message for rank, message in enumerate(messages) if message is not None}

    def _start_anew(self, failures: dict[int, str]) -> None:
        """Restart all engines and send them the current weights."""
        reasons = "; ".join(f"rank {rank}: {message}" for rank, message in failures.items())
        if self._sender is None:
            raise EngineError(f"an engine failed and nothing sends it the weights for a new start: {reasons}")
        self._restart(reasons)
        self.repeat(self._sender.send)

    def _restart(self, reasons: str) -> None:
        """Start all engines anew, if that is still allowed."""
        if self.restarts == self.max_restarts:
            raise EngineError(
                f"an engine failed after {self.restarts} restarts in a row (data.max_engine_restarts): {reasons}"
            )
        self.restarts += 1
        if self.world.rank == 0:
            warnings.warn(
                f"{reasons}; restart {self.restarts} of {self.max_restarts} in a row, with the current weights, and "
                f"its work once more",
                stacklevel=4,
            )
        # Also where nothing failed: an engine beside a process group builds groups of its own, which takes all ranks.
        self.world.together(self.engine.restart, EngineError)
