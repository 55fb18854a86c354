"""What vLLM is asked for when it decodes given tokens, and how its answer is read. Imports no vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from app.engine.errors import EngineError
from app.engine.forced_decoding import GIVEN_IDS, GIVEN_ROW, GivenRow, forced_tokens
from app.engine.router_logits import Place, RouterLogits, hf_router_names, routers
from app.engine.vllm.process_state import process_state_kept
from app.types import Decoding


def given_params(given: GivenRow, top_k: int, read_prefix_cache: bool) -> dict[str, Any]:
    """Return the arguments of SamplingParams that differ from those of sampling."""
    return {
        "max_tokens": len(given.token_ids),
        "seed": None,  # What is drawn does not count, and vLLM's seeded draws fail on a CPU in partial prefills.
        "logprobs": top_k,
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_reading_prefix_cache": not read_prefix_cache,
        "extra_args": {GIVEN_IDS: list(given.token_ids), GIVEN_ROW: given.row},
    }


@contextlib.contextmanager
def decoding_given(runner: Any, rows: Sequence[GivenRow], routers_of: str | None) -> Iterator[RouterLogits]:
    """Let a vLLM model runner decode `rows` within the block; yields the router logits that it had.

    Args:
        runner: vLLM's model runner.
        rows: what is decoded.
        routers_of: folder of the model whose router logits are recorded. None: none are.

    Raises:
        EngineError: see `forced_tokens`; or if the routers are not those that transformers has.
    """
    modules = {} if routers_of is None else _named_routers(runner.model, routers_of)
    # Unseeded draws come from the process's random state, which is the trainer's too.
    recorded = RouterLogits(modules, rows, lambda: vllm_places(runner))
    with process_state_kept(), forced_tokens(runner), recorded:
        yield recorded


def read_decoding(
    given: GivenRow, output: Any, logprobs: tuple[float, ...], top_k: int, recorded: RouterLogits
) -> Decoding:
    """Return what a request's output says.

    Args:
        given: what was to be decoded.
        output: vLLM's RequestOutput.
        logprobs: of the ids of its completion.
        top_k: how many of the likeliest ids were asked for.
        recorded: router logits of the call.

    Raises:
        EngineError: if the ids are not the given ones.
    """
    done = output.outputs[0]
    if tuple(done.token_ids) != given.token_ids:
        raise EngineError(
            f"request {given.row}: vLLM did not decode the given tokens but {list(done.token_ids)[:8]}...: its sampler "
            f"went another way (speculative decoding, or a model runner other than V1)"
        )
    # The dict of a position also holds the given id, wherever it ranks.
    top = [sorted(at.items(), key=lambda item: -item[1].logprob)[:top_k] for at in done.logprobs]
    return Decoding(
        prompt_ids=tuple(output.prompt_token_ids),
        logprobs=logprobs,
        top_ids=tuple(tuple(token for token, _ in at) for at in top),
        top_logprobs=tuple(tuple(float(entry.logprob) for _, entry in at) for at in top),
        router_logits=recorded.of(given.row),
    )


def _named_routers(model: nn.Module, model_path: str) -> dict[str, nn.Module]:
    own, names = routers(model), hf_router_names(model_path)
    if len(own) != len(names):
        raise EngineError(
            f"vLLM's model has {len(own)} routers and transformers' has {len(names)}: their logits cannot be matched"
        )
    return dict(zip(names, own.values(), strict=True))


def vllm_places(runner: Any) -> list[Place]:
    """Return where vLLM's V1 model runner put the tokens of each request in the forward pass that it runs."""
    batch, starts = runner.input_batch, runner.query_start_loc.np
    places = []
    for index, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        row = runner.requests[request_id].sampling_params.extra_args[GIVEN_ROW]
        where = slice(int(starts[index]), int(starts[index + 1]))
        places.append(Place(row, int(batch.num_computed_tokens_cpu[index]), where))
    return places
