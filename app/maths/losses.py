"""Per-token policy surrogates: what to minimise so that tokens of rows with advantage become likelier.

Letters: r = new / old, the policy ratio (staleness, not mismatch); A the row's advantage. Every function takes
`new_logprobs` [B, T] with gradient, `old_logprobs` [B, T], `mask` [B, T] bool and `advantages` [B], and returns a
loss per token, 0 where masked. Nothing at a masked position is read, in value or gradient. log r is clamped to
[-20, 20], as verl does: beyond it the gradient through r is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.maths.divergence import LOG_RATIO_BOUND
from app.maths.masking import masked_mean, select


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """A loss per token, and which tokens the clip took out of it."""

    loss: Tensor
    """[B, T] to minimise, with gradient; 0 where masked."""
    clipped_low: Tensor
    """[B, T] bool: valid tokens whose ratio is below the lower bound and for which that changes the gradient."""
    clipped_high: Tensor
    """[B, T] bool: likewise above the upper bound."""


def ppo_clip(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Surrogate:
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) (PPO, arXiv 1707.06347; two epsilons: DAPO, 2503.14476).

    `delta` also bounds r by delta > 1 + epsilon_high where A < 0, the one place where PPO's loss is unbounded:
    dual-clip (arXiv 1912.09729, its c) or two-sided clipping (INTELLECT-2, arXiv 2505.07291).
    """
    log_ratio, advantage = _selected(new_logprobs, old_logprobs, mask, advantages)
    return _clipped(log_ratio.exp(), advantage, epsilon_low, epsilon_high, delta)


def gspo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """PPO's clip on the row's geometric mean ratio s = exp(mean_t log r) (GSPO, arXiv 2507.18071, eq. 5 to 7).

    The paper's epsilons are small: 3e-4 and 4e-4. Every token of the row has the same loss.
    """
    log_ratio, advantage = _selected(new_logprobs, old_logprobs, mask, advantages)
    row_ratio = masked_mean(log_ratio, mask, dim=1).exp()[:, None].expand_as(log_ratio)
    return _clipped(row_ratio, advantage, epsilon_low, epsilon_high)


def gspo_token(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """GSPO's value with a gradient of each token's own: s_t = sg[s] * new_t / sg[new_t] (arXiv 2507.18071, eq. 13, 14).

    Under a row mean its gradient is that of `gspo`; under a token mean a token is not weighed by its row's length.
    """
    log_ratio, advantage = _selected(new_logprobs, old_logprobs, mask, advantages)
    row_ratio = masked_mean(log_ratio.detach(), mask, dim=1).exp()[:, None]
    own_gradient = (log_ratio - log_ratio.detach()).exp()  # worth 1; log r has the gradient of new_logprobs
    return _clipped(row_ratio * own_gradient, advantage, epsilon_low, epsilon_high)


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
    log_ratio, advantage = _selected(new_logprobs, old_logprobs, mask, advantages)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return Surrogate(
        loss=-weight * advantage * select(new_logprobs, mask),
        clipped_low=(ratio < 1 - epsilon_low) & (advantage != 0),
        clipped_high=(ratio > 1 + epsilon_high) & (advantage != 0),
    )


def sapo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> Surrogate:
    """-sigmoid(tau (r - 1)) 4 / tau A, tau by the sign of A: a soft clip (SAPO, arXiv 2511.20347; tau 1.0 and 1.05).

    At r = 1 its gradient is REINFORCE's; it fades on both sides, so no token is ever clipped.
    """
    log_ratio, advantage = _selected(new_logprobs, old_logprobs, mask, advantages)
    tau = torch.full_like(advantage, temperature_neg).masked_fill(advantage > 0, temperature_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return Surrogate(loss=-gate * advantage, clipped_low=torch.zeros_like(mask), clipped_high=torch.zeros_like(mask))


def reinforce(new_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> Surrogate:
    """-A new_logprobs (Williams 1992): no ratio to an old policy, for one update per rollout."""
    loss = -_token_advantages(advantages, mask, new_logprobs) * select(new_logprobs, mask)
    return Surrogate(loss=loss, clipped_low=torch.zeros_like(mask), clipped_high=torch.zeros_like(mask))


def _clipped(
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


def _selected(new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """log r, clamped, and the advantage, both [B, T] and 0 where masked."""
    if new_logprobs.shape != old_logprobs.shape:
        raise ValueError(
            f"new_logprobs {tuple(new_logprobs.shape)} and old_logprobs {tuple(old_logprobs.shape)} differ in shape."
        )
    log_ratio = select(new_logprobs - old_logprobs, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio, _token_advantages(advantages, mask, new_logprobs)


def _token_advantages(advantages: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Advantages [B] at the row's valid tokens [B, T], 0 elsewhere: an empty row may hold NaN."""
    if advantages.shape != mask.shape[:1]:
        raise ValueError(f"advantages {tuple(advantages.shape)} must be [B] for a mask {tuple(mask.shape)}.")
    return select(advantages.to(like.dtype)[:, None].expand(mask.shape), mask)
