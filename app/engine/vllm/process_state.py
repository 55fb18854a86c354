"""vLLM inside the trainer's process: what vLLM must know about the other ranks, and restoring what it changes.

vLLM changes random states, thread functions and the default process group.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from app.errors import first_line


def launcher_args() -> Mapping[str, str]:
    """Return the vllm.LLM arguments for one of several processes, each with its own engine on its own device."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return {}
    # vLLM needs both; not every strategy that spawns processes sets them.
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", str(torch.cuda.current_device() if torch.cuda.is_available() else 0))
    return {"distributed_executor_backend": "external_launcher"}


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the random states and the thread functions that building vLLM changes."""
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


def shut_down(llm: Any, keep_default_group: bool) -> None:
    """Shut a vllm.LLM down, also after a failure; a shutdown that fails is a warning.

    Args:
        llm: to shut down; the caller drops it.
        keep_default_group: True: the default process group is the trainer's and stays.
    """
    try:
        with _default_group_kept() if keep_default_group else contextlib.nullcontext():
            llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        warnings.warn(f"vLLM did not shut down in order: {first_line(error)}", stacklevel=3)


@contextlib.contextmanager
def _default_group_kept() -> Iterator[None]:
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
