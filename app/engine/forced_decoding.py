"""Forced decoding: an engine emits prescribed tokens on its own decode path, key-value cache included.

Nothing here imports vLLM: its model runner is recognised by its attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.engine.errors import EngineError, RequestError
from app.engine.protocol import check_requests
from app.types import Request

FORCED_IDS = "lockstep_forced_ids"
"""Key in `SamplingParams.extra_args`, which vLLM passes through: the ids that the request must emit."""
FORCED_ROW = "lockstep_forced_row"
"""Key in the same dict: index of the request in the call. vLLM itself assigns other request ids."""


@dataclass(frozen=True, kw_only=True)
class ForcedRow:
    """A completion whose tokens an engine must emit."""

    row: int
    """Index of the request in the call, from 0."""
    request: Request
    """The prompt before the completion; its seed is not used."""
    token_ids: tuple[int, ...]
    """Ids of the completion, in order; never empty."""

    @property
    def computed(self) -> int:
        """Number of tokens that the model computes: all but the last, after which nothing is predicted."""
        return len(self.request.token_ids) + len(self.token_ids) - 1


def forced_rows(
    requests: Sequence[Request], completions: Sequence[Sequence[int]], max_model_len: int, vocab_size: int
) -> list[ForcedRow]:
    """Return each request with its completion, all of them checked first.

    Raises:
        RequestError: naming the request's index, if its prompt is bad (see `check_requests`), its completion is empty
            or holds an unknown id, or both together exceed `max_model_len` tokens; or if the counts differ.
    """
    if len(requests) != len(completions):
        raise RequestError(f"{len(requests)} requests but {len(completions)} completions to decode")
    check_requests(requests, max_model_len, vocab_size)
    rows = []
    for index, (request, ids) in enumerate(zip(requests, completions, strict=True)):
        if not ids:
            raise RequestError(f"request {index}: the completion to decode is empty")
        if len(request.token_ids) + len(ids) > max_model_len:
            raise RequestError(
                f"request {index}: {len(request.token_ids)} prompt and {len(ids)} completion tokens do not fit into "
                f"the engine's context max_model_len={max_model_len}"
            )
        unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise RequestError(f"request {index}: completion id {unknown} is outside the vocabulary of {vocab_size}")
        rows.append(ForcedRow(row=index, request=request, token_ids=tuple(ids)))
    return rows


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
