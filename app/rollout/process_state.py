"""What vLLM changes for the whole process, put back: random states, thread functions, the default process group."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Put back the random states and the thread functions that building vLLM changes."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


@contextlib.contextmanager
def default_group_kept() -> Iterator[None]:
    """Let vLLM destroy the process groups it made, but not the default one: that is the trainer's."""
    destroy = dist.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = destroy_own
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
