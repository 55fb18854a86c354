"""What the audit computes from the logits of rows: log-probabilities, likeliest tokens, ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.audit.types import TokenScores
from app.data.collate import split_by_tokens
from app.maths.sampling import sampled_distribution
from app.policy.scoring import output_head
from app.types import SamplingConfig

TOKENS_AT_A_TIME = 256
"""Tokens whose log-probabilities over the whole vocabulary are in memory at the same time."""
SAMPLE_TOKENS = 256
"""Most tokens whose logits are stored for the fit of a temperature."""
SAMPLE_VALUES = 1 << 26
"""Most logits stored for that fit: 256 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A completion to score, and the prompt before it."""

    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    completion: tuple[int, ...]
    """Token ids of the completion; never empty."""

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and completion together."""
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, kw_only=True)
class LogitStatistics:
    """Statistics of the unfiltered logits that the fits need, from one pass over all rows."""

    ranks: Tensor
    """[N] int64: rank of the audited token, 1 for the likeliest."""
    mass_before: Tensor
    """[N] float64: probability of all tokens that are at least as likely, without the audited one."""
    places: Tensor
    """[n] int64: indices of a sample of tokens, evenly spread over all N."""
    logits: Tensor
    """[n, V] float32: logits of the sampled tokens, before division by the temperature."""
    ids: Tensor
    """[n] int64: audited ids of the sampled tokens."""


def single_rows(policy: PreTrainedModel, rows: Sequence[Row], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the completion's logits [T, V] of each row, alone through the model's own forward pass.

    The last id predicts no audited token and is left out; the last T positions then predict the completion.
    """
    for index, row in enumerate(rows):
        ids = torch.tensor([[*row.prompt, *row.completion][:-1]], device=device)
        count = len(row.completion)
        yield index, policy(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0, -count:]


def left_padded(
    policy: PreTrainedModel, rows: Sequence[Row], device: torch.device, *, pad_token_id: int, max_tokens: int | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the completion's logits [T, V] of each row, padded on the left, in batches of `max_tokens`.

    Masked keys and shifted position ids keep the padding out of the result, up to rounding.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].tokens)
    head = output_head(policy)
    for run in split_by_tokens([rows[i].tokens for i in order], max_tokens):
        members = order[run]
        width = max(rows[i].tokens for i in members) - 1
        ids = torch.full((len(members), width), pad_token_id)
        mask = torch.zeros_like(ids)
        for place, i in enumerate(members):
            start = width - (rows[i].tokens - 1)
            ids[place, start:] = torch.tensor([*rows[i].prompt, *rows[i].completion][:-1])
            mask[place, start:] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = policy.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        for place, i in enumerate(members):
            yield i, head(hidden[place, -len(rows[i].completion) :])


def score_rows(
    logits_of_rows: Iterator[tuple[int, Tensor]],
    rows: Sequence[Row],
    sampling: SamplingConfig,
    top_k: int,
    *,
    statistics: bool = False,
) -> tuple[TokenScores, LogitStatistics | None]:
    """Score every completion token.

    Args:
        logits_of_rows: index of each row and its completion's logits [T, V], in any order.
        rows: all of them.
        sampling: temperature and sampling support of the distribution to score under.
        top_k: how many of the likeliest tokens to return for each position.
        statistics: whether to compute the statistics; `sampling` must have no filters then.

    Returns:
        Scores in the order of `rows`, and the statistics if requested.
    """
    counts = [len(row.completion) for row in rows]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    found: dict[str, list[Tensor]] = {}
    order: list[int] = []
    sample: list[Tensor] = []
    places: Tensor | None = None
    for index, logits in logits_of_rows:
        ids = torch.tensor(rows[index].completion, device=logits.device)
        order.append(index)
        for chunk in torch.arange(counts[index]).split(TOKENS_AT_A_TIME):
            part = slice(int(chunk[0]), int(chunk[-1]) + 1)
            for name, value in _score_tokens(logits[part], ids[part], sampling, top_k, statistics).items():
                found.setdefault(name, []).append(value.cpu())
        if statistics:
            places = _sample_places(starts[-1], logits.shape[-1]) if places is None else places
            here = places[(places >= starts[index]) & (places < starts[index + 1])] - starts[index]
            sample.append(logits[here.to(logits.device)].float())
    joined = {name: _in_order(torch.cat(values), order, counts) for name, values in found.items()}
    scores = TokenScores(
        logprobs=joined["logprobs"], top_ids=joined["top_ids"], top_logprobs=joined["top_logprobs"].double()
    )
    if not statistics:
        return scores, None
    assert places is not None
    all_ids = torch.tensor([token for row in rows for token in row.completion])
    return scores, LogitStatistics(
        ranks=joined["ranks"],
        mass_before=joined["mass_before"],
        places=places,
        logits=torch.cat([sample[order.index(i)] for i in range(len(rows))]),
        ids=all_ids[places],
    )


def _score_tokens(
    logits: Tensor, ids: Tensor, sampling: SamplingConfig, top_k: int, statistics: bool
) -> dict[str, Tensor]:
    logprobs = sampled_distribution(logits, sampling)
    own = logprobs.gather(-1, ids[:, None])
    top = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
    values = {"logprobs": own.squeeze(-1).double(), "top_ids": top.indices, "top_logprobs": top.values}
    if statistics:
        values["ranks"] = (logprobs > own).sum(-1) + 1
        at_least = logprobs.masked_fill(logprobs < own, -torch.inf).exp().sum(-1, dtype=torch.float64)
        values["mass_before"] = at_least - own.squeeze(-1).double().exp()
    return values


def _sample_places(tokens: int, vocabulary: int) -> Tensor:
    """Indices of evenly spread tokens, as many as may be stored."""
    count = max(1, min(tokens, SAMPLE_TOKENS, SAMPLE_VALUES // vocabulary))
    return torch.linspace(0, tokens - 1, count, dtype=torch.float64).round().long().unique()


def _in_order(values: Tensor, order: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Sort values by row; they come in the order `order`, `counts[i]` of them for row i."""
    parts = values.split([counts[i] for i in order])
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat([parts[place] for place in back])
