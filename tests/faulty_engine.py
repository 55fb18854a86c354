"""Engines that break on purpose."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from app.engine import watchdog
from app.engine.vllm.engine import VLLMEngine
from app.types import Request, SamplingConfig
from app.world import World
from tests.engine.clocks import StandingClock

SKIPPED = "model.layers.1.self_attn.k_proj.weight"


class SkippingEngine(VLLMEngine):
    """Keeps one parameter as it was first loaded, from the second sync on."""

    _first: Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load all weights but one."""
        super().load_weights(self._stale(weights), policy_version)

    def _stale(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name == SKIPPED:
                self._first = tensor.clone() if self._first is None else self._first
                tensor = self._first
            yield name, tensor


class FaultyEngine(VLLMEngine):
    """vLLM that breaks in the third step of chosen generate calls, of one rank.

    In such a call the watchdog's clock stands until the call hangs, and then goes on to the time-out: a slow machine is
    not taken for a fault, and nobody waits.

    Args:
        fault: raise: an exception inside vLLM. hang: Python code that sleeps. native: C code that neither returns nor
            lets a signal handler run.
        at_calls: which generate calls break, counted from 1 (the canary of a weight sync is one); those after a
            restart count on.
        rank: where.
    """

    def __init__(
        self,
        fault: Literal["raise", "hang", "native"] = "raise",
        at_calls: Sequence[int] = (2,),
        rank: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.fault = {"raise": _raise, "hang": sleep, "native": lock_twice}[fault]
        self.at_calls = tuple(at_calls)
        self.faulty_rank = rank
        self.calls = 0

    def _generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Any]:
        self.calls += 1
        if self.calls not in self.at_calls or World().rank != self.faulty_rank:
            return super()._generate(requests, sampling)
        core, steps = self._started().llm_engine.engine_core, 0

        def broken() -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                self.fault()
            return type(core).get_output(core)

        core.get_output = broken
        try:
            with patch.object(watchdog, "CLOCK", StandingClock(lambda: in_sleep() or in_second_lock())):
                return super()._generate(requests, sampling)
        finally:
            del core.get_output


class NarrowEngine(VLLMEngine):
    """vLLM whose memory holds the decoding of `fits` requests at once."""

    def __init__(self, fits: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fits = fits
        self.sizes: list[int] = []
        """Requests of each call."""

    def _generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Any]:
        self.sizes.append(len(requests))
        model = self._runner().model
        forward: Callable[..., Any] = model.forward

        def narrow(*args: Any, **kwargs: Any) -> Any:
            if self._runner().input_batch.num_reqs > self.fits:
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
            return forward(*args, **kwargs)

        model.forward = narrow
        try:
            return super()._generate(requests, sampling)
        finally:
            del model.forward


def _raise() -> None:
    raise RuntimeError("broken on purpose")


def sleep() -> None:
    """Hang in Python: a signal's handler can run."""
    hanging = True  # noqa: F841 read by in_sleep
    time.sleep(3600)


def lock_twice() -> None:
    """Hang in C: a default mutex (all zero bytes) locked by its owner waits for ever, also after a signal."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    for locked in range(2):  # noqa: B007 read by in_second_lock
        lock(mutex)


def in_sleep() -> bool:
    """Whether the main thread hangs in `sleep`."""
    return _local(sleep, "hanging") is True


def in_second_lock() -> bool:
    """Whether the main thread hangs in `lock_twice`; asked by another thread.

    Who sees `locked` at 1 holds the interpreter lock, so the main thread has let go of it since: in the second call.
    """
    return _local(lock_twice, "locked") == 1


def _local(function: Callable[[], None], name: str) -> Any:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return frame.f_locals.get(name) if frame.f_code is function.__code__ else None
