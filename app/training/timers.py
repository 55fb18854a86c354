"""Seconds by phase of training, and tokens per second."""

from __future__ import annotations

from collections import defaultdict

PHASES = ("rollout", "scoring", "update", "sync")


class Phases:
    """Adds up seconds by phase, for the interval since the last read and for the whole run."""

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        """Seconds of each phase since the start of this process."""
        self._interval: dict[str, float] = defaultdict(float)
        self._tokens = 0.0

    def add(self, phase: str, seconds: float) -> None:
        """Count `seconds` of a phase."""
        self.total[phase] += seconds
        self._interval[phase] += seconds

    def add_tokens(self, tokens: float) -> None:
        """Count completion tokens of all ranks that were trained on."""
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
