"""Batches small enough for the memory: halved when it runs out, and the size remembered."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from app.engine.errors import EngineError, EngineFailure
from app.errors import causes

Item = TypeVar("Item")
Output = TypeVar("Output")

ADVICE = (
    "lower data.engine.max_num_seqs or data.engine.max_model_len; on a GPU also data.engine.gpu_memory_utilization, or "
    "data.engine.kv_cache_memory_bytes where it is set: what the cache takes is missing elsewhere"
)


class OutOfMemory(EngineFailure):
    """A call needed more memory than there is; the engine is unharmed and can do smaller ones."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, is about memory. On a CPU PyTorch raises a plain RuntimeError."""
    for link in causes(error):
        if isinstance(link, (MemoryError, torch.OutOfMemoryError)):
            return True
        text = str(link).lower()
        if isinstance(link, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text):
            return True
    return False


class FittingBatches:
    """Splits the requests of a call into parts that fit into memory, and remembers the size for later calls.

    `largest`: most requests that the engine processes at once; more in one call need no more memory.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.size: int | None = None
        """Most requests in a part; None: memory never ran out."""

    def run(self, requests: Sequence[Item], call: Callable[[Sequence[Item]], list[Output]]) -> list[Output]:
        """Return the outputs of `call` for all requests in order; a part that raises OutOfMemory is halved.

        Raises:
            EngineError: if a single request does not fit.
        """
        before = self.size
        outputs: list[Output] = []
        while len(outputs) < len(requests):
            part = requests[len(outputs) : len(outputs) + (self.size or len(requests))]
            try:
                outputs += call(part)
                continue
            except OutOfMemory as error:
                message = str(error)
            # Not inside the except: the exception keeps the failed call's tensors alive.
            if len(part) == 1:
                raise EngineError(f"one request alone needs more memory than there is: {message}; {ADVICE}")
            self.size = min(len(part), self.largest) // 2 or 1
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if self.size != before:
            warnings.warn(
                f"the engine ran out of memory with {min(before or len(requests), self.largest)} requests at once; "
                f"from now on it samples in parts of {self.size}, which takes longer: {ADVICE}",
                stacklevel=3,
            )
        return outputs
