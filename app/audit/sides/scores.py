"""From the logits of rows to what the audit keeps of them: log-probabilities, likeliest tokens, ranks."""

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
"""Of which log-probabilities over the vocabulary exist at a time."""
SAMPLE_TOKENS = 256
"""Most tokens whose logits are kept for the temperature's fit."""
SAMPLE_VALUES = 1 << 26
"""Most logits kept for it: 256 MiB."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A completion to score, and what it is scored after."""

    prompt: tuple[int, ...]
    """Ids."""
    completion: tuple[int, ...]
    """Ids; never empty."""

    @property
    def tokens(self) -> int:
        """Of both."""
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over the plain logits tells beside the log-probabilities."""

    ranks: Tensor
    """[N] int64: 1 for the likeliest token."""
    mass_before: Tensor
    """[N] float64: probability of all tokens that are at least as likely, the audited one excepted."""
    places: Tensor
    """[n] int64: indices of tokens spread over all of them."""
    logits: Tensor
    """[n, V] float32: theirs, before the temperature."""
    ids: Tensor
    """[n] int64: the audited ids there."""


def single_rows(policy: PreTrainedModel, rows: Sequence[Row], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the completion's logits [T, V] of each row, alone through the model's own forward pass.

    The last id predicts nothing that is asked for and is left out; then the last T positions are the completion's.
    """
    for index, row in enumerate(rows):
        ids = torch.tensor([[*row.prompt, *row.completion][:-1]], device=device)
        kept = len(row.completion)
        yield index, policy(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, -kept:]


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


def read(
    logits_of_rows: Iterator[tuple[int, Tensor]],
    rows: Sequence[Row],
    sampling: SamplingConfig,
    top_k: int,
    *,
    survey: bool = False,
) -> tuple[TokenScores, Survey | None]:
    """Score every completion token.

    Args:
        logits_of_rows: index of each row and its completion's logits [T, V], in any order.
        rows: all of them.
        sampling: temperature and sampling support of the distribution to score under.
        top_k: how many of the likeliest tokens to keep.
        survey: whether to take one; `sampling` must have no filters then.

    Returns:
        Scores in the order of `rows`, and the survey if it was asked for.
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
            for name, value in _read_tokens(logits[part], ids[part], sampling, top_k, survey).items():
                found.setdefault(name, []).append(value.cpu())
        if survey:
            places = _sample_places(starts[-1], logits.shape[-1]) if places is None else places
            here = places[(places >= starts[index]) & (places < starts[index + 1])] - starts[index]
            sample.append(logits[here.to(logits.device)].float())
    joined = {name: _in_order(torch.cat(values), order, counts) for name, values in found.items()}
    scores = TokenScores(
        logprobs=joined["logprobs"], top_ids=joined["top_ids"], top_logprobs=joined["top_logprobs"].double()
    )
    if not survey:
        return scores, None
    assert places is not None
    all_ids = torch.tensor([token for row in rows for token in row.completion])
    return scores, Survey(
        ranks=joined["ranks"],
        mass_before=joined["mass_before"],
        places=places,
        logits=torch.cat([sample[order.index(i)] for i in range(len(rows))]),
        ids=all_ids[places],
    )


def _read_tokens(logits: Tensor, ids: Tensor, sampling: SamplingConfig, top_k: int, survey: bool) -> dict[str, Tensor]:
    logprobs = sampled_distribution(logits, sampling)
    own = logprobs.gather(-1, ids[:, None])
    top = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
    values = {"logprobs": own.squeeze(-1).double(), "top_ids": top.indices, "top_logprobs": top.values}
    if survey:
        values["ranks"] = (logprobs > own).sum(-1) + 1
        at_least = logprobs.masked_fill(logprobs < own, -torch.inf).exp().sum(-1, dtype=torch.float64)
        values["mass_before"] = at_least - own.squeeze(-1).double().exp()
    return values


def _sample_places(tokens: int, vocabulary: int) -> Tensor:
    """Indices of tokens evenly spread, as many as may be kept."""
    count = max(1, min(tokens, SAMPLE_TOKENS, SAMPLE_VALUES // vocabulary))
    return torch.linspace(0, tokens - 1, count, dtype=torch.float64).round().long().unique()


def _in_order(values: Tensor, order: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Put values of the rows `order`, `counts` of each, into the order of the rows."""
    parts = values.split([counts[i] for i in order])
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat([parts[place] for place in back])
