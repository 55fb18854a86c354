"""Functions run as the ranks of one process group, each in a process of its own."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

WORLD = 2


def free_port() -> int:
    """Return a port of this machine that the system says nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def on_ranks(work: Callable[..., None], *args: Any, world: int = WORLD) -> None:
    """Run `work(rank, *args)` in `world` new processes; the exception of one is raised here, and ends the other."""
    mp.spawn(_run, args=(work, args), nprocs=world)


def _run(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    work(rank, *args)
    # The interpreter's finalisation is left out: native threads of gloo and DeepSpeed that let go of their last tensors
    # meanwhile abort the process ("terminate called without an active exception"), seldom, long after all was checked.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
