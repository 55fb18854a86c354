"""vLLM's errors as ours, in one line with the key to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.engine.batching import OutOfMemory, is_out_of_memory
from app.engine.errors import EngineError, EngineFailure
from app.errors import first_line


def broken_off(error: Exception, refused: bool) -> EngineError:
    """Return our error for one from `generate`: out of memory, requests `refused` for good, or a failed engine."""
    if is_out_of_memory(error):
        return OutOfMemory(f"vLLM ran out of memory: {first_line(error)}")
    if refused:
        return EngineError(f"vLLM refused the requests: {first_line(error)}")
    return EngineFailure(f"vLLM failed to generate: {first_line(error)}")


def cache_key(args: Mapping[str, Any]) -> str:
    """Return the setting that determines the size of the key-value cache, for these arguments of vllm.LLM."""
    sized = "kv_cache_memory_bytes" in args
    return f"data.engine.{'kv_cache_memory_bytes' if sized else 'gpu_memory_utilization'}"


def start_fault(error: Exception, args: Mapping[str, Any]) -> str:
    """Return why vLLM did not start; a cache that is too small with our keys, as vLLM may name one without effect."""
    text = str(error)
    if "KV cache is needed" not in text and "memory for the cache blocks" not in text:
        return text
    key = cache_key(args)
    length = args.get("max_model_len", "the model's own")
    return (
        f"the key-value cache cannot hold one sequence of max_model_len ({length}): raise {key} "
        f"({args[key.rpartition('.')[2]]}) or lower data.engine.max_model_len (vLLM: {text.split('. ')[0]})"
    )
