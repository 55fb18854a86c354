"""vLLM in a process that is not its own: what it is told about the others, and what it changes and must be put back.

It changes random states, thread functions and the default process group.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def launcher_args() -> Mapping[str, str]:
    """Return what tells vLLM that this process is one of several, each with its own engine on its own device."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return {}
    # vLLM reads both; strategies that spawn do not all set them.
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", str(torch.cuda.current_device() if torch.cuda.is_available() else 0))
    return {"distributed_executor_backend": "external_launcher"}


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
