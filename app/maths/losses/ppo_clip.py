"""PPO's clipped ratio per token, the surrogate of GRPO, BNPO, Dr. GRPO and DAPO."""

from __future__ import annotations

from torch import Tensor

from app.maths.losses.surrogate import Surrogate, pessimistic_clip, selected


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
    log_ratio, advantage = selected(new_logprobs, old_logprobs, mask, advantages)
    return pessimistic_clip(log_ratio.exp(), advantage, epsilon_low, epsilon_high, delta)
