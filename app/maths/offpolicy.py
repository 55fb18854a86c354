"""Off-policy sequence masking: rows that the current policy has left and that it should unlearn anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.masking import masked_mean, select


@torch.no_grad()
def sequence_keep(
    new_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """Rows [B] to keep: a row is dropped iff mean_t(behaviour - new) > delta and its advantage is below 0.

    DeepSeek-V3.2 (arXiv 2512.02556, "Off-Policy Sequence Masking"). Both comparisons are strict; an empty row is
    kept, and a missing (NaN) token counts as no difference.

    Args:
        new_logprobs: [B, T] nats, the current policy's.
        behaviour_logprobs: [B, T] nats: the rollout's where all ranks have them, else the old policy's.
        mask: [B, T] bool, valid tokens.
        advantages: [B].
        delta: nats per token, 0 or more.

    Raises:
        ValueError: on a negative `delta` or shapes that do not fit.
    """
    if not delta >= 0:
        raise ValueError(f"delta={delta}: the off-policy threshold is 0 or more nats per token.")
    if advantages.shape != mask.shape[:1]:
        raise ValueError(f"advantages {tuple(advantages.shape)} must be [B]; mask is {tuple(mask.shape)}.")
    return kept_rows(row_drift(token_drift(new_logprobs, behaviour_logprobs, mask), mask), advantages, delta)


@torch.no_grad()
def token_drift(new_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """behaviour - new of each token [B, T], nats; 0 where masked or missing (NaN).

    Raises:
        ValueError: on shapes that do not fit.
    """
    if not new_logprobs.shape == behaviour_logprobs.shape == mask.shape:
        raise ValueError(
            f"new_logprobs {tuple(new_logprobs.shape)}, behaviour_logprobs {tuple(behaviour_logprobs.shape)} and "
            f"mask {tuple(mask.shape)} must have one shape [B, T]."
        )
    difference = behaviour_logprobs - new_logprobs
    return select(difference, mask & ~difference.isnan())


def row_drift(drift: Tensor, mask: Tensor) -> Tensor:
    """Mean of `token_drift` over each row's tokens [B], in nats: what the row is judged by; 0 for an empty row."""
    return masked_mean(drift, mask, dim=1)


def kept_rows(drift: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """Rows [B] to keep, by their `row_drift` and advantages [B]."""
    return ~((drift > delta) & (advantages < 0))
