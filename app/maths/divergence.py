"""Per-token estimators of how far two policies are apart, from tokens drawn by one of them.

All take `log_ratio` = log target - log sampler at tokens that the *sampler* drew, in nats, already selected by the
mask (0 where masked). Their mean over tokens estimates the divergence named. Two uses: the mismatch, with the
rollout as sampler and the trainer as target; the KL penalty, with the current policy as sampler and the reference
as target.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus or minus this before `exp`, as ms-swift and verl do: e^20 is 4.9e8."""


def kl_sampler_target_k1(log_ratio: Tensor) -> Tensor:
    """k1 = -log_ratio: unbiased for KL(sampler || target), negative at some tokens (Schulman 2020, "Approximating KL").

    As a loss term its expected gradient is 0 on-policy: use k2 or k3 for a penalty.
    """
    return -log_ratio


def kl_sampler_target_k2(log_ratio: Tensor) -> Tensor:
    """k2 = log_ratio^2 / 2: biased for KL(sampler || target), never negative (Schulman 2020, "Approximating KL").

    As a loss term its on-policy expected gradient is that of KL(sampler || target) (arXiv 2506.09477).
    """
    return log_ratio.square() / 2


def kl_sampler_target_k3(log_ratio: Tensor) -> Tensor:
    """k3 = e^log_ratio - 1 - log_ratio: unbiased for KL(sampler || target), never negative (Schulman 2020)."""
    return torch.expm1(log_ratio) - log_ratio


def chi_squared_target_sampler(log_ratio: Tensor) -> Tensor:
    """(target / sampler)^2 - 1: unbiased for chi^2(target || sampler), the variance of the importance ratio."""
    return torch.expm1(2 * log_ratio)
