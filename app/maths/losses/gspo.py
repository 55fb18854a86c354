"""GSPO: PPO's clip on one ratio for the whole row."""

from __future__ import annotations

from torch import Tensor

from app.maths.losses.surrogate import Surrogate, pessimistic_clip, selected
from app.maths.masking import masked_mean


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
    log_ratio, advantage = selected(new_logprobs, old_logprobs, mask, advantages)
    row_ratio = masked_mean(log_ratio, mask, dim=1).exp()[:, None].expand_as(log_ratio)
    return pessimistic_clip(row_ratio, advantage, epsilon_low, epsilon_high)


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
    log_ratio, advantage = selected(new_logprobs, old_logprobs, mask, advantages)
    row_ratio = masked_mean(log_ratio.detach(), mask, dim=1).exp()[:, None]
    own_gradient = (log_ratio - log_ratio.detach()).exp()  # worth 1; log r has the gradient of new_logprobs
    return pessimistic_clip(row_ratio * own_gradient, advantage, epsilon_low, epsilon_high)
