"""REINFORCE: the policy gradient without a ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.losses.surrogate import Surrogate, token_advantages
from app.maths.masking import select


def reinforce(new_logprobs: Tensor, mask: Tensor, advantages: Tensor) -> Surrogate:
    """-A new_logprobs (Williams 1992): no ratio to an old policy, for one update per rollout."""
    loss = -token_advantages(advantages, mask, new_logprobs) * select(new_logprobs, mask)
    return Surrogate(loss=loss, clipped_low=torch.zeros_like(mask), clipped_high=torch.zeros_like(mask))
