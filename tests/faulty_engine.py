"""Engines that break on purpose."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from app.engine.vllm.engine import VLLMEngine
from app.types import Request, SamplingConfig
from app.world import World

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
        self.fault = {"raise": _raise, "hang": _sleep, "native": _lock_twice}[fault]
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


def _sleep() -> None:
    time.sleep(3600)


def _lock_twice() -> None:
    # A default mutex (all zero bytes) locked by its owner waits for ever, and goes on waiting after a signal.
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)
