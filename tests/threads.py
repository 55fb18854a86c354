"""Two ranks as two threads of this process: what one rank does while the other fails, quickly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from app.world import World


class ThreadWorld(World):
    """One of two ranks that are threads."""

    size = 2
    rank = 0

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank = rank
        self.barrier = barrier
        self.shared = shared

    def gather(self, value):
        self.shared[self.rank] = value
        self.barrier.wait()
        values = list(self.shared)
        self.barrier.wait()
        return values


def on_two_threads(run: Callable[[World], object]) -> list:
    """Return what `run` returns or raises on each of two ranks."""
    barrier, shared, outcomes = threading.Barrier(2, timeout=300), [None, None], [None, None]

    def rank(index: int) -> None:
        try:
            outcomes[index] = run(ThreadWorld(index, barrier, shared))
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    return outcomes
