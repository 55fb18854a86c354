"""vLLM inside the training process, one engine per rank; `start` is the first to import it."""

import gc
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.data.end_tokens import eos_token_ids
from app.engine.batching import FittingBatches
from app.engine.errors import EngineError, EngineFailure
from app.engine.forced_decoding import ForcedRow, forced_rows
from app.engine.protocol import Engine, check_requests, constructor_arguments
from app.engine.vllm.decoding import (
    forced_params,
    forcing_rows,
    sampling_params,
    to_completion,
    to_decoding,
    token_logprobs,
)
from app.engine.vllm.failures import cache_key, start_fault
from app.engine.vllm.process_state import launcher_args, process_state_kept, shut_down
from app.engine.vllm.startup import import_vllm, llm_arguments, plain_cpu_layers
from app.engine.vllm.step_observer import observed_generate
from app.engine.vllm.weights import engine_checksums, engine_weight_layout, engine_weights, write_weights
from app.engine.watchdog import Stalled, Watchdog
from app.engine.weight_layout import WeightLayout
from app.types import Completion, Decoding, Request, SamplingConfig

MINIMUM_TEMPERATURE = 0.01
DTYPES = ("auto", "float32", "bfloat16", "float16")
CLOSE_SECONDS = 120.0
"""Seconds that a broken engine has to close before it counts as hung; a sound one takes about one."""


class VLLMEngine(Engine):
    """Samples with vLLM, in this process. Arguments carry vLLM's own names; see vLLM's engine arguments.

    Args:
        dtype: precision of weights and activations: "float32", "bfloat16", "float16" or "auto" (the checkpoint's).
            On a CPU without AMX float32 is the fastest choice.
        max_model_len: longest prompt and completion together, in tokens; None: the model's own limit.
        max_num_seqs: most sequences decoded at once.
        gpu_memory_utilization: share of the GPU that the engine may fill, the trainer's use included.
        enforce_eager: True skips CUDA graphs and compilation; None: eager on a CPU (compiling takes over a minute
            there and gains nothing), graphs on a GPU.
        kv_cache_dtype: "auto" (as `dtype`) or e.g. "fp8", a real source of mismatch.
        block_size: tokens of a key-value cache block; None: 32 on a CPU, vLLM's choice on a GPU.
        kv_cache_memory_bytes: size of the key-value cache; None: 256 MiB on a CPU, on a GPU what
            `gpu_memory_utilization` leaves.
        quantization: e.g. "fp8", applied when the checkpoint is loaded. Such an engine can be audited but not
            synced: its weights cannot be replaced in place.
        stall_timeout: seconds that sampling may go on without one decoding step being finished; after that the engine
            counts as hung. Longer than the slowest prefill, and well below the time-out of the process group (30
            minutes unless changed), in which the other ranks wait meanwhile. Null: wait for ever.
        engine_args: further arguments of vllm.LLM, passed on as they are.
    """

    _running = False

    def __init__(
        self,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        gpu_memory_utilization: float = 0.4,
        enforce_eager: bool | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        quantization: str | None = None,
        stall_timeout: float | None = 600.0,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        self.arguments = constructor_arguments(locals())
        if dtype not in DTYPES:
            raise ValueError(f"data.engine.dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
        if stall_timeout is not None and not stall_timeout > 0:
            raise ValueError(f"data.engine.stall_timeout={stall_timeout}: seconds above 0, or null to wait for ever")
        self.quantization = quantization
        self.kv_cache_dtype = kv_cache_dtype
        self.stall_timeout = stall_timeout
        own = {name: value for name, value in self.arguments.items() if name not in ("stall_timeout", "engine_args")}
        self._args = llm_arguments(own, engine_args or {})
        self._llm: Any = None
        self._batches = FittingBatches(max_num_seqs)
        self._saw_preemptions = False
        self._incomplete = False
        self._saw_nan = False

    def start(self, model_path: str, seed: int) -> None:
        """Build vLLM with the model at `model_path`; takes seconds.

        Random states and thread count are left as they were: vLLM re-seeds python, numpy and torch, and on a CPU
        replaces `torch.set_num_threads` by a function that does nothing.

        Raises:
            EngineError: if vLLM is missing or too old, fails to start (its reason is passed on), or runs in this
                process already.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # Else the weights live in a child process.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if VLLMEngine._running:
            raise EngineError("another vLLM engine runs in this process, and they share state: close it first")
        self._launched_by_trainer = dist.is_available() and dist.is_initialized()
        with process_state_kept():
            vllm = import_vllm()
            self._eos = eos_token_ids(model_path)
            try:
                with plain_cpu_layers():
                    self._llm = vllm.LLM(
                        model=model_path,
                        seed=seed,
                        logprobs_mode="processed_logprobs",
                        skip_tokenizer_init=True,
                        **launcher_args(),
                        **self._args,
                    )
            except Exception as error:
                raise EngineError(
                    f"vLLM could not start with {model_path}: {start_fault(error, self._args)}"
                ) from error
        VLLMEngine._running = True
        self._origin = (model_path, seed)
        self._incomplete = self._saw_nan = False
        self._sampling_params = vllm.SamplingParams
        self._max_model_len: int = self._llm.llm_engine.model_config.max_model_len
        self._vocab_size: int = self._llm.llm_engine.model_config.get_vocab_size()
        self._packed = [name for weight in engine_weights(self._model()) if weight.packed for name in weight.parts]
        lossy = self.quantization is not None or self.kv_cache_dtype != "auto"
        self._layout = engine_weight_layout(self._model(), lossy)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Sample one completion per request in a single vLLM call; see `Engine.generate`.

        A completion that reaches the context's end is cut there with reason "length".

        Raises:
            ValueError: naming the request, if its prompt is empty, too long or holds an unknown id; if the temperature
                lies between 0 and 0.01.
            EngineFailure: if vLLM fails on the way, or finishes no step for `stall_timeout` seconds.
            EngineError: if not started, if weights are half-written, if vLLM refuses the requests, if one of them
                alone needs more memory than there is, or if a log-probability is NaN.
        """
        self._check_ready(sampling)
        check_requests(requests, self._max_model_len, self._vocab_size)
        outputs = self._batches.run(requests, lambda part: self._generate(part, sampling))
        done = [output.outputs[0] for output in outputs]
        return [to_completion(index, each, self._logprobs(index, each)) for index, each in enumerate(done)]

    def decode(
        self,
        requests: Sequence[Request],
        completions: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        top_k: int = 5,
        batch_size: int | None = None,
        read_prefix_cache: bool = True,
        router_logits: bool = False,
    ) -> list[Decoding]:
        """Decode forced tokens by the path that samples; see `Engine.decode`. Each batch begins with an empty cache.

        vLLM reports at most 20 of the likeliest ids, unless `engine_args: {max_logprobs: ...}` allows more.
        """
        self._check_ready(sampling)
        if router_logits and read_prefix_cache:
            raise ValueError("router_logits needs read_prefix_cache=False: nothing is routed for cached tokens")
        rows = forced_rows(requests, completions, self._max_model_len, self._vocab_size)
        size = batch_size or len(rows) or 1

        def decode_part(part: Sequence[ForcedRow]) -> list[Any]:
            params = [
                self._params(forced.request, sampling, **forced_params(forced, top_k, read_prefix_cache))
                for forced in part
            ]
            return self._call([forced.request for forced in part], params)

        routers_of = self._origin[0] if router_logits and self._origin is not None else None
        with forcing_rows(self._runner(), rows, routers_of) as recorded:
            outputs = [
                output
                for start in range(0, len(rows), size)
                for output in self._batches.run(rows[start : start + size], decode_part)
            ]
        return [
            to_decoding(forced, output, self._logprobs(forced.row, output.outputs[0]), top_k, recorded)
            for forced, output in zip(rows, outputs, strict=True)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Write the full set of weights in place, one tensor at a time; see `Engine.load_weights`.

        Call `weight_layout.check_shapes` on all names and shapes first: a fault found on the way leaves the weights
        half-written, and the engine refuses to sample until it has received a full set.

        Raises:
            EngineError: if a weight is missing, unexpected or of the wrong shape, if vLLM fails, or if the engine is
                quantised.
        """
        llm = self._started()
        if self.quantization is not None:
            raise EngineError(
                f"quantization={self.quantization!r}: quantised weights cannot be replaced in place; "
                f"train with quantization: null"
            )
        if self._packed:
            raise EngineError(f"vLLM packed the weights of {self._packed[0]}, among others: they cannot be replaced")
        self._incomplete = True
        write_weights(self._model(), weights, self._layout)
        if self._saw_nan:
            # Key and value blocks written with NaN weights poison later requests: NaN times a masked 0 is NaN.
            for cache in self._runner().kv_caches:
                cache.zero_()
            self._saw_nan = False
        if not llm.reset_prefix_cache():
            raise EngineError("vLLM did not reset its prefix cache after the sync: requests are still running in it")
        self._incomplete = False
        self.policy_version = policy_version

    def checksums(self) -> dict[str, int]:
        """Return the checksum of every weight that vLLM computes with, fused layers split."""
        self._started()
        return engine_checksums(self._model())

    def weight_layout(self) -> WeightLayout:
        """Return the names, shapes and dtypes of the weights that `load_weights` needs."""
        self._started()
        return self._layout

    def close(self) -> None:
        """Close vLLM and free its memory, also after a failure; the trainer's process group stays."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        VLLMEngine._running = False
        shut_down(llm, keep_default_group=self._launched_by_trainer)
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restart(self) -> None:
        """Close and start anew; see `Engine.restart`. A close that hangs is interrupted like a call that hangs."""
        try:
            with Watchdog(self.stall_timeout and CLOSE_SECONDS, "closing vLLM"):
                self.close()
        except Stalled as stalled:
            raise EngineError(str(stalled)) from None
        super().restart()

    def _generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Any]:
        return self._call(requests, [self._params(request, sampling) for request in requests])

    def _call(self, requests: Sequence[Request], params: list[Any]) -> list[Any]:
        """Return vLLM's outputs of one call with these sampling parameters, in order."""
        llm = self._started()
        self._reset_cache()
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        outputs, preemptions = observed_generate(llm, prompts, params, self.stall_timeout)
        if preemptions and not self._saw_preemptions:
            self._saw_preemptions = True
            warnings.warn(
                f"the key-value cache did not hold the {len(requests)} requests of a call: vLLM computed some again, "
                f"{preemptions} times. The result is the same but takes longer: raise "
                f"{cache_key(self._args)}, or lower data.engine.max_num_seqs",
                stacklevel=5,
            )
        return outputs

    def _reset_cache(self) -> None:
        # Blocks cached under older weights, or by an earlier call, must not change the result.
        if not self._started().reset_prefix_cache():
            raise EngineFailure("vLLM did not reset its prefix cache: requests are still running in it")

    def _runner(self) -> Any:
        return self._started().llm_engine.model_executor.driver_worker.worker.model_runner

    def _model(self) -> Any:
        return self._runner().model

    def _started(self) -> Any:
        if self._llm is None:
            raise EngineError("the engine is not running: call start first")
        return self._llm

    def _check_ready(self, sampling: SamplingConfig) -> None:
        self._started()
        if self._incomplete:
            raise EngineError("the last load_weights failed part-way: send the full set of weights before sampling")
        if 0 < sampling.temperature < MINIMUM_TEMPERATURE:
            raise ValueError(
                f"temperature={sampling.temperature}: vLLM would silently use {MINIMUM_TEMPERATURE}; take that or "
                f"more, or 0 for greedy decoding"
            )

    def _params(self, request: Request, sampling: SamplingConfig, **changed: Any) -> Any:
        return self._sampling_params(**(sampling_params(request, sampling, self._eos) | changed))

    def _logprobs(self, index: int, output: Any) -> tuple[float, ...]:
        logprobs = token_logprobs(output)
        if any(math.isnan(value) for value in logprobs):
            self._saw_nan = True
            raise EngineError(f"request {index}: vLLM's log-probabilities are NaN: the weights it holds are not finite")
        return logprobs
