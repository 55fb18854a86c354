"""What all surrogates share: the result, the checked and selected inputs, and PPO's clip of any ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.maths.divergence import LOG_RATIO_BOUND
from app.maths.masking import select


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """A loss per token, and which tokens the clip took out of it."""

    loss: Tensor
    """[B, T] to minimise, with gradient; 0 where masked."""
    clipped_low: Tensor
    """[B, T] bool: valid tokens whose ratio is below the lower bound and for which that changes the gradient."""
    clipped_high: Tensor
    """[B, T] bool: likewise above the upper bound."""


def pessimistic_clip(
    ratio: Tensor, advantage: Tensor, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """PPO's pessimistic clip of any ratio [B, T]; `advantage` [B, T] is 0 where masked."""
    capped = ratio if delta is None else ratio.clamp(max=delta)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return Surrogate(
        loss=-torch.minimum(capped * advantage, clipped * advantage),
        clipped_low=(ratio < 1 - epsilon_low) & (advantage < 0),
        clipped_high=(ratio > 1 + epsilon_high) & (advantage > 0),
    )


def selected(new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """log r, clamped, and the advantage, both [B, T] and 0 where masked."""
    if new_logprobs.shape != old_logprobs.shape:
        raise ValueError(
            f"new_logprobs {tuple(new_logprobs.shape)} and old_logprobs {tuple(old_logprobs.shape)} differ in shape."
        )
    log_ratio = select(new_logprobs - old_logprobs, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio, token_advantages(advantages, mask, new_logprobs)


def token_advantages(advantages: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Advantages [B] at the row's valid tokens [B, T], 0 elsewhere: an empty row may hold NaN."""
    if advantages.shape != mask.shape[:1]:
        raise ValueError(f"advantages {tuple(advantages.shape)} must be [B] for a mask {tuple(mask.shape)}.")
    return select(advantages.to(like.dtype)[:, None].expand(mask.shape), mask)
