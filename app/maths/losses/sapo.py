"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.losses.surrogate import Surrogate, selected


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
    log_ratio, advantage = selected(new_logprobs, old_logprobs, mask, advantages)
    tau = torch.full_like(advantage, temperature_neg).masked_fill(advantage > 0, temperature_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return Surrogate(loss=-gate * advantage, clipped_low=torch.zeros_like(mask), clipped_high=torch.zeros_like(mask))
