"""The progress bar of an audit, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

Costs = dict[str, float]


class Progress:
    """A bar over the stages of an audit, each weighted by its usual cost.

    The total grows during the audit: only a mismatch is attributed.
    """

    def __init__(self, *, shown: bool = True) -> None:
        """Begin with an empty bar; `shown`: whether it is drawn on standard error."""
        self.seconds: dict[str, float] = {}
        """Wall time of each stage, seconds."""
        self._bar = tqdm(
            total=0,
            disable=not shown,
            bar_format="{desc:<52} {percentage:3.0f}% |{bar:20}| {elapsed}, about {remaining} to go",
            dynamic_ncols=True,
        )

    def expect(self, cost: float) -> None:
        """Add the cost of a later stage to the total; negative: a stage that is skipped."""
        self._bar.total += cost
        self._bar.refresh()

    @contextmanager
    def stage(self, name: str, cost: float) -> Iterator[None]:
        """Show and time the stage within the block, then advance by its cost."""
        self._bar.set_description_str(name[:52])
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self._bar.update(cost)

    def close(self) -> None:
        """Close the bar where it is."""
        self._bar.total = self._bar.n
        self._bar.close()
