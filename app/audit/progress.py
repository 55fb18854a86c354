"""How far an audit is, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

Costs = dict[str, float]


class Progress:
    """A bar over the stages of an audit, each weighted by what it usually costs: an engine's start is the dearest.

    The work grows while it goes on: only a mismatch is attributed.
    """

    def __init__(self, *, shown: bool = True) -> None:
        """Begin with an empty bar; `shown`: on standard error."""
        self.seconds: dict[str, float] = {}
        """Wall time by stage."""
        self._bar = tqdm(
            total=0,
            disable=not shown,
            bar_format="{desc:<52} {percentage:3.0f}% |{bar:20}| {elapsed}, about {remaining} to go",
            dynamic_ncols=True,
        )

    def expect(self, cost: float) -> None:
        """Announce work that is to come."""
        self._bar.total += cost
        self._bar.refresh()

    @contextmanager
    def stage(self, name: str, cost: float) -> Iterator[None]:
        """Do work that was announced."""
        self._bar.set_description_str(name[:52])
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self._bar.update(cost)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.total = self._bar.n
        self._bar.close()
