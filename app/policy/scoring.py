"""Log-probabilities of sampled tokens under a Hugging Face model, within a token budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from app.data.collate import split_by_tokens
from app.maths.logprobs import selected_logprobs
from app.types import TrainBatch
from app.world import World

HEAD_ROWS = 1024
"""Tokens of one call of the head: their logits are all that exists at a time."""


def sampled_logprobs(
    policy: PreTrainedModel,
    batch: TrainBatch,
    *,
    temperature: float,
    max_tokens: int | None,
    with_entropy: bool = False,
    in_step: World | None = None,
) -> tuple[Tensor, Tensor]:
    """Score every sampled token of `batch`; no other token is scored.

    Rows are scored in runs of at most `max_tokens` padded tokens. With gradients and more than one run, each run
    is recomputed in the backward pass, so that only one run's activations are alive and one backward serves the
    whole batch (several backward passes per step are silently wrong under DeepSpeed).

    Args:
        policy: the causal language model.
        batch: rows, best sorted by length.
        temperature: divides the logits, as in sampling.
        max_tokens: budget of one forward pass; None: the whole batch at once.
        with_entropy: whether entropies are computed; zeros are returned otherwise.
        in_step: ranks that must call the model equally often, because each call gathers its weights (ZeRO-3). Those
            with less to score call it again for nothing.

    Returns:
        Log-probabilities and entropies (nats, no gradient), each [B, T] float32, 0 where masked.
    """
    runs = split_by_tokens(batch.lengths, max_tokens)
    head_calls = max(-(-sum(batch.sampled_tokens[run]) // HEAD_ROWS) for run in runs)
    idle: list[slice] = []
    if in_step is not None:
        everyone = in_step.gather((len(runs), head_calls))
        head_calls = max(calls for _, calls in everyone)
        idle = [slice(0, 1)] * (max(count for count, _ in everyone) - len(runs))
    recompute = len(runs) + len(idle) > 1 and torch.is_grad_enabled()
    head = output_head(policy)

    def score(run: slice) -> tuple[Tensor, Tensor]:
        hidden = policy.base_model(
            input_ids=batch.input_ids[run, : max(batch.lengths[run])], use_cache=False
        ).last_hidden_state
        rows, columns = _sampled_places(batch, run)
        ids = batch.input_ids[run][rows, columns]
        logprobs, entropy = selected_logprobs(
            hidden[rows, columns - 1],
            head,
            ids,
            temperature,
            HEAD_ROWS,
            with_entropy=with_entropy,
            min_chunks=head_calls,
        )
        return logprobs, torch.zeros_like(logprobs) if entropy is None else entropy

    scored = [checkpoint(score, run, use_reentrant=False) if recompute else score(run) for run in [*runs, *idle]]
    place = _flat_places(batch)
    logprobs, entropies = (torch.cat(values) for values in zip(*scored[: len(runs)], strict=True))
    for unused, _ in scored[len(runs) :]:
        logprobs = logprobs + 0 * unused.sum()  # so that the backward pass goes through it on every rank
    return _scatter(logprobs, place, batch), _scatter(entropies, place, batch)


def output_head(policy: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return hidden [n, H] -> logits [n, V] as the model's own forward computes them.

    Some families scale or cap the logits after the head (Cohere, Granite, Gemma); the engine does so too.
    """
    head = policy.get_output_embeddings()
    config = policy.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    if scale == 1.0 and cap is None:
        return head

    def logits(hidden: Tensor) -> Tensor:
        values = head(hidden) * scale
        return values if cap is None else torch.tanh(values / cap) * cap

    return logits


def _sampled_places(batch: TrainBatch, run: slice) -> tuple[Tensor, Tensor]:
    """Rows and columns, in `input_ids[run]`, of the run's sampled tokens; each is predicted one column earlier.

    Built from host counts, so that no device sync is needed.
    """
    device = batch.input_ids.device
    counts = batch.sampled_tokens[run]
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device, non_blocking=True)
    places = torch.cat([torch.arange(count) for count in counts]).to(device, non_blocking=True)
    return rows, batch.positions[run][rows, places]


def _flat_places(batch: TrainBatch) -> Tensor:
    """Places of the valid tokens in a flattened [B, T], row by row."""
    width = batch.mask.shape[1]
    places = [torch.arange(i * width, i * width + count) for i, count in enumerate(batch.sampled_tokens)]
    return torch.cat(places).to(batch.mask.device, non_blocking=True)


def _scatter(values: Tensor, places: Tensor, batch: TrainBatch) -> Tensor:
    """Put the values of the valid tokens into zeros of shape [B, T]."""
    return values.new_zeros(batch.mask.numel()).scatter(0, places, values).view(batch.mask.shape)
