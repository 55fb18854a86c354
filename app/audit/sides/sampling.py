"""The rows to audit: sampled once, by the engine as it is configured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from app.audit.types import AuditRow, TokenScores
from app.engine.protocol import Engine
from app.errors import LockstepError
from app.rollout.collector import row_seed
from app.types import Prompt, Request, SamplingConfig

Mode = Literal["quick", "thorough"]
GROUP = 2
"""Completions for each prompt: the second finds the prompt in the prefix cache, as a group in training does."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work an audit does."""

    tokens: int
    """Number of completion tokens to aim at."""
    max_tokens: int | None
    """Most tokens in a completion; None: as configured."""
    rows: tuple[int, int]
    """Least and most rows to sample."""
    rounds: int
    """Most factors that are removed one after the other."""
    tries_all: bool
    """Whether larger interventions are tried although a smaller one has explained everything."""


EFFORTS: dict[Mode, Effort] = {
    "quick": Effort(tokens=1000, max_tokens=48, rows=(16, 128), rounds=2, tries_all=False),
    "thorough": Effort(tokens=10_000, max_tokens=None, rows=(64, 512), rounds=4, tries_all=True),
}
"""The effort behind each value of --mode."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The sampled rows with the engine's log-probabilities."""

    requests: tuple[Request, ...]
    """The requests as they were sent to the engine."""
    rows: tuple[AuditRow, ...]
    """One sampled row for each request."""
    scores: TokenScores
    """The log-probabilities that came with the samples."""
    sampling: SamplingConfig
    """The sampling settings with which the rows were drawn."""


def plan_requests(
    prompts: Sequence[Prompt], sampling: SamplingConfig, effort: Effort, rows: int | None, seed: int
) -> tuple[list[Request], SamplingConfig]:
    """Return the requests, spread evenly over `prompts`, and the sampling settings.

    Args:
        prompts: all prompts of the run.
        sampling: the configured settings.
        effort: how much the audit does.
        rows: number of completions; None: as many as `effort` needs.
        seed: the seed of the run; each completion draws as in the first rollout.
    """
    length = min(sampling.max_tokens, effort.max_tokens or sampling.max_tokens)
    if rows is None:
        least, most = effort.rows
        rows = min(max(-(-effort.tokens // length), least), most)
    count = -(-rows // GROUP)
    chosen = [i * len(prompts) // min(count, len(prompts)) for i in range(min(count, len(prompts)))]
    requests = [
        Request(token_ids=prompts[chosen[i % len(chosen)]].token_ids, seed=row_seed(seed, i, member))
        for i in range(count)
        for member in range(GROUP)
    ]
    return requests[:rows], dataclasses.replace(sampling, max_tokens=length)


def sample_rows(engine: Engine, requests: Sequence[Request], sampling: SamplingConfig) -> Sampled:
    """Sample one row for each request.

    Raises:
        LockstepError: if the engine returns no log-probabilities: there is nothing to compare.
    """
    completions = engine.generate(requests, sampling)
    if any(completion.logprobs is None for completion in completions):
        raise LockstepError(f"{type(engine).__name__} gives no log-probabilities, so there is nothing to audit")
    return Sampled(
        requests=tuple(requests),
        rows=tuple(
            AuditRow(
                prompt_ids=request.token_ids,
                completion_ids=completion.token_ids,
                finish_reason=completion.finish_reason,
            )
            for request, completion in zip(requests, completions, strict=True)
        ),
        scores=TokenScores(
            logprobs=torch.tensor(
                [value for completion in completions for value in completion.logprobs or ()], dtype=torch.float64
            )
        ),
        sampling=sampling,
    )
