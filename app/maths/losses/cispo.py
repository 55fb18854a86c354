"""CISPO: the clipped ratio as a weight of REINFORCE."""

from __future__ import annotations

from torch import Tensor

from app.maths.losses.surrogate import Surrogate, selected
from app.maths.masking import select


def cispo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """-sg[clip(r, 1 - epsilon_low, 1 + epsilon_high)] A new_logprobs (CISPO, MiniMax-M1, arXiv 2506.13585).

    The ratio is a clipped weight: no token loses its gradient. `epsilon_low=1` is no lower bound, as in the paper.
    TRL's `epsilon_high` for this loss is the bound itself, 1 + epsilon_high here.
    """
    log_ratio, advantage = selected(new_logprobs, old_logprobs, mask, advantages)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return Surrogate(
        loss=-weight * advantage * select(new_logprobs, mask),
        clipped_low=(ratio < 1 - epsilon_low) & (advantage != 0),
        clipped_high=(ratio > 1 + epsilon_high) & (advantage != 0),
    )
