"""A canary: let the engine generate, score the same tokens with the trainer, compare.

The engine must generate: a prompt that is only scored does not read the prefix cache, so entries left there by
older weights would pass unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from app.sync.verify import SyncError
from app.types import Completion, Request

Scorer = Callable[[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]], Sequence[Sequence[float]]]
"""From (prompt ids, completion ids) of each row to the trainer's log-probability of each completion token, at the
temperature the completions were sampled with."""

MEAN_TOLERANCES = {torch.float64: 5e-4, torch.float32: 5e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Largest mean |delta| in nats, by the coarser dtype of the two sides. Measured with equal weights on SmolLM2-135M:
float32 6e-6, float16 4.4e-3, bfloat16 3.4e-2 to 4.6e-2. Measured in float32 with weights one AdamW step old: 1.6e-3
at learning rate 1e-6, 1.6e-2 at 1e-5; with a stale tied head: 0.09. So float32 sees one stale step, while bfloat16
sees only gross faults and the checksums must prove the rest."""
LOSSY_MEAN_TOLERANCE = 0.5
"""Largest mean |delta| in nats with a quantised key-value cache or quantised weights; measured 0.17 to 0.37."""
MAX_OVER_MEAN = 20.0
"""Largest single |delta|, in multiples of the mean's tolerance; measured with equal weights: at most 26 times the
measured mean, which is 1.3 to 80 times below its tolerance."""


@dataclass(frozen=True, kw_only=True)
class CanaryReport:
    """How far apart the log-probabilities of engine and trainer were."""

    mean_abs_diff: float
    """Mean |engine - trainer| over the tokens, nats."""
    max_abs_diff: float
    """Largest |engine - trainer|, nats."""
    tokens: int
    """Number of tokens that were compared."""


def mean_tolerance(*dtypes: torch.dtype, lossy: bool = False) -> float:
    """Return the largest mean |delta| in nats that equal weights explain, for sides that compute in `dtypes`."""
    return LOSSY_MEAN_TOLERANCE if lossy else max(MEAN_TOLERANCES[dtype] for dtype in dtypes)


def canary_requests(prompts: Sequence[Sequence[int]], seed: int, rows: int = 4) -> list[Request]:
    """Return requests for the first `rows` of `prompts`, given as token ids; row i is sampled with `seed` + i.

    Only a prompt longer than a cache block reads the prefix cache, and so shows that it is stale.
    """
    return [Request(token_ids=tuple(ids), seed=seed + row) for row, ids in enumerate(prompts[:rows])]


def scored_rows(
    requests: Sequence[Request], completions: Sequence[Completion]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what a `Scorer` takes: prompt and completion ids of each row."""
    return [(request.token_ids, done.token_ids) for request, done in zip(requests, completions, strict=True)]


def compare_logprobs(
    completions: Sequence[Completion], scored: Sequence[Sequence[float]], tolerance: float
) -> CanaryReport:
    """Compare the engine's log-probabilities with the trainer's, token by token. A NaN on either side fails.

    Raises:
        SyncError: if the mean |delta| exceeds `tolerance` (see `mean_tolerance`) or one token's exceeds
            `MAX_OVER_MEAN` times that; the message has the numbers. Also if the engine gave no log-probabilities, or
            the lengths differ.
    """
    diffs: list[float] = []
    for row, (completion, values) in enumerate(zip(completions, scored, strict=True)):
        if completion.logprobs is None or len(completion.logprobs) != len(values):
            raise SyncError(f"canary row {row}: the engine and the scorer must each give a value for every token")
        diffs += [abs(ours - theirs) for ours, theirs in zip(completion.logprobs, values, strict=True)]
    if not diffs:
        raise SyncError("canary: the engine generated no token")
    report = CanaryReport(
        mean_abs_diff=math.fsum(diffs) / len(diffs),
        max_abs_diff=max(diffs, key=lambda diff: math.inf if math.isnan(diff) else diff),
        tokens=len(diffs),
    )
    if not (report.mean_abs_diff <= tolerance and report.max_abs_diff <= MAX_OVER_MEAN * tolerance):
        raise SyncError(
            f"canary: log-probabilities of engine and trainer are {report.mean_abs_diff:.2e} nats apart on average "
            f"and {report.max_abs_diff:.2e} at most, over {report.tokens} tokens; equal weights explain up to "
            f"{tolerance:.0e} and {MAX_OVER_MEAN * tolerance:.0e}: the engine samples with other weights, another "
            f"precision or a stale cache"
        )
    return report
