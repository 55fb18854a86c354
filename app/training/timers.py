"""Seconds by phase of training, and tokens per second."""

from __future__ import annotations

import time
from collections import defaultdict

from app.rollout.steps import RolloutReport

PHASES = ("rollout", "scoring", "update", "sync")


class Timers:
    """Adds up seconds by phase, for the interval since the last read and for the whole run."""

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        """Seconds of each phase since the start of this process."""
        self._interval: dict[str, float] = defaultdict(float)
        self._tokens = 0.0
        self._started: float | None = None

    def start_update(self) -> None:
        """Start the clock of the phase `update`."""
        self._started = time.perf_counter()

    def stop_update(self) -> None:
        """Stop the clock of the phase `update`, if it runs."""
        if self._started is not None:
            self.add("update", time.perf_counter() - self._started)
            self._started = None

    def add(self, phase: str, seconds: float) -> None:
        """Count `seconds` of a phase."""
        self.total[phase] += seconds
        self._interval[phase] += seconds

    def add_rollout(self, report: RolloutReport) -> None:
        """Count what a rollout took, sampling and scoring apart."""
        self.add("rollout", report.rollout_seconds)
        self.add("scoring", report.scoring_seconds)

    def add_tokens(self, tokens: float) -> None:
        """Count sampled tokens of all ranks that were trained on."""
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Return `time/<phase>` in seconds and `time/tokens_per_second` of the interval, and begin a new one."""
        values = {f"time/{phase}": self._interval[phase] for phase in PHASES}
        busy = sum(self._interval.values())
        if busy:
            values["time/tokens_per_second"] = self._tokens / busy
        self._interval.clear()
        self._tokens = 0.0
        return values
