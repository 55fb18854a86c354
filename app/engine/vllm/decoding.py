"""Requests to vLLM and its outputs, for sampling and for forced decoding. Nothing here imports vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from app.engine.errors import EngineError, EngineFailure
from app.engine.forced_decoding import FORCED_IDS, FORCED_ROW, ForcedRow
from app.engine.router_logits import Place, RouterLogits
from app.engine.vllm.process_state import process_state_kept
from app.types import Completion, Decoding, Request, SamplingConfig
from app.weights.names import hf_router_names, routers


def sampling_params(request: Request, sampling: SamplingConfig, eos: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of SamplingParams for a request that samples until one of the ids `eos`."""
    return {
        **dataclasses.asdict(sampling),  # The names are vLLM's own.
        "seed": request.seed % 2**63,  # vLLM takes -1 for "no seed".
        "logprobs": 0,  # Of the sampled token only.
        "stop_token_ids": eos,
        "detokenize": False,
    }


def token_logprobs(output: Any) -> tuple[float, ...]:
    """Return the log-probability of each token of a vLLM CompletionOutput, nats."""
    # Each position holds a dict by token id; its first entry need not be the sampled token.
    return tuple(float(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True))


def to_completion(index: int, output: Any, logprobs: tuple[float, ...]) -> Completion:
    """Return the completion of request `index` from its CompletionOutput.

    Raises:
        EngineFailure: if vLLM ended it for another reason than an end of sequence or the length.
    """
    if output.finish_reason not in ("stop", "length"):
        raise EngineFailure(f"request {index}: vLLM ended it with {output.finish_reason!r}")
    return Completion(token_ids=tuple(output.token_ids), logprobs=logprobs, finish_reason=output.finish_reason)


def forced_params(forced: ForcedRow, top_k: int, read_prefix_cache: bool) -> dict[str, Any]:
    """Return the arguments of SamplingParams that differ between forced decoding and sampling."""
    return {
        "max_tokens": len(forced.token_ids),
        "seed": None,  # The draw is replaced, and vLLM's seeded draws fail on a CPU in partial prefills.
        "logprobs": top_k,
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_reading_prefix_cache": not read_prefix_cache,
        "extra_args": {FORCED_IDS: list(forced.token_ids), FORCED_ROW: forced.row},
    }


@contextlib.contextmanager
def forcing_rows(runner: Any, rows: Sequence[ForcedRow], routers_of: str | None) -> Iterator[RouterLogits]:
    """Force `rows` on a vLLM model runner within the block, and yield its router logits.

    Args:
        runner: vLLM's model runner.
        rows: the completions to decode.
        routers_of: folder of the model whose router logits are recorded. None: none are recorded.

    Raises:
        EngineError: see `forced_tokens`; or if vLLM and transformers have different routers.
    """
    modules = {} if routers_of is None else _named_routers(runner.model, routers_of)
    # Unseeded draws come from the process's random state, which is the trainer's too.
    recorded = RouterLogits(modules, rows, lambda: vllm_places(runner))
    with process_state_kept(), forced_tokens(runner), recorded:
        yield recorded


def to_decoding(
    forced: ForcedRow, output: Any, logprobs: tuple[float, ...], top_k: int, recorded: RouterLogits
) -> Decoding:
    """Return the decoding from vLLM's output for one request.

    Args:
        forced: the completion that was requested.
        output: vLLM's RequestOutput.
        logprobs: one for each token of the completion, nats.
        top_k: how many of the likeliest ids were requested.
        recorded: router logits recorded during the call.

    Raises:
        EngineError: if vLLM emitted other ids.
    """
    done = output.outputs[0]
    if tuple(done.token_ids) != forced.token_ids:
        raise EngineError(
            f"request {forced.row}: vLLM did not decode the forced tokens but {list(done.token_ids)[:8]}...: its "
            f"sampler went another way (speculative decoding, or a model runner other than V1)"
        )
    # The dict of a position also holds the forced id, whatever its rank.
    top = [sorted(at.items(), key=lambda item: -item[1].logprob)[:top_k] for at in done.logprobs]
    return Decoding(
        prompt_ids=tuple(output.prompt_token_ids),
        logprobs=logprobs,
        top_ids=tuple(tuple(token for token, _ in at) for at in top),
        top_logprobs=tuple(tuple(float(entry.logprob) for _, entry in at) for at in top),
        router_logits=recorded.of(forced.row),
    )


def _named_routers(model: nn.Module, model_path: str) -> dict[str, nn.Module]:
    own, names = routers(model), hf_router_names(model_path)
    if len(own) != len(names):
        raise EngineError(
            f"vLLM's model has {len(own)} routers and transformers' has {len(names)}: their logits cannot be matched"
        )
    return dict(zip(names, own.values(), strict=True))


def vllm_places(runner: Any) -> list[Place]:
    """Return where the tokens of each request are in the forward pass that vLLM's V1 model runner runs now."""
    batch, starts = runner.input_batch, runner.query_start_loc.np
    places = []
    for index, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        row = runner.requests[request_id].sampling_params.extra_args[FORCED_ROW]
        where = slice(int(starts[index]), int(starts[index + 1]))
        places.append(Place(row, int(batch.num_computed_tokens_cpu[index]), where))
    return places


@contextlib.contextmanager
def forced_tokens(runner: Any) -> Iterator[None]:
    """Let a vLLM model runner emit the ids in the requests' `extra_args` (`FORCED_IDS`) instead of those it drew.

    The sampler still runs, so vLLM gathers the log-probabilities of the forced ids under the distribution it drew
    from. Requests without forced ids keep their draw. The runner is restored on exit.

    Raises:
        EngineError: if the runner is of another kind than vLLM's first (V1) model runner.
    """
    sampler: Any = getattr(runner, "sampler", None)
    if not (hasattr(sampler, "sample") and hasattr(runner, "requests") and hasattr(runner, "input_batch")):
        raise EngineError(
            f"cannot make vLLM's {type(runner).__name__} decode forced tokens, only its V1 model runner: set "
            f"VLLM_USE_V2_MODEL_RUNNER=0 in the environment"
        )
    before = vars(sampler).get("sample")  # A wrapper that was there already, if any.
    sample = sampler.sample

    def forced(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled, logprobs = sample(logits, *args, **kwargs)
        rows, ids = _next_ids(runner, len(sampled))
        emitted = sampled.clone()
        emitted[rows] = torch.tensor(ids, dtype=sampled.dtype).to(sampled.device)
        return emitted, logprobs

    sampler.sample = forced
    try:
        yield
    finally:
        if before is None:
            del sampler.sample
        else:
            sampler.sample = before


def _next_ids(runner: Any, count: int) -> tuple[list[int], list[int]]:
    """Return the batch rows that have forced ids, and the id that each must emit now."""
    rows, ids = [], []
    for row, request_id in enumerate(runner.input_batch.req_ids[:count]):
        state = runner.requests[request_id]
        forced = (state.sampling_params.extra_args or {}).get(FORCED_IDS)
        if forced is not None:
            # With asynchronous scheduling vLLM may sample one token too many, which it drops. It also drops what a
            # preempted or partly prefilled request emits while it is computed (again).
            ids.append(forced[min(len(state.output_token_ids), len(forced) - 1)])
            rows.append(row)
    return rows, ids
