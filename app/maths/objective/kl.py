"""The KL penalty to the reference, as a term of the loss or of the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.divergence import LOG_RATIO_BOUND, kl_sampler_target_k1, kl_sampler_target_k2, kl_sampler_target_k3
from app.maths.masking import select
from app.maths.objective.config import KLEstimator, LossConfig

_ESTIMATORS = {"k1": kl_sampler_target_k1, "k2": kl_sampler_target_k2, "k3": kl_sampler_target_k3}


def token_log_ratio(target: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """log target / sampler [B, T], 0 where masked, clamped so that its exp stays finite."""
    return select(target - sampler, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate [B, T] of KL(policy || reference), with gradient through `logprobs`; 0 where masked."""
    return _ESTIMATORS[estimator](token_log_ratio(ref_logprobs, logprobs, mask))


def bias_corrected_kl(kl: Tensor, new_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(new / old) * kl [B, T], with gradient through both factors (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    `kl` is an estimate by `reference_kl`. Over tokens that old sampled, the means of r * k1 and r * k3 are
    KL(new || reference), in value and gradient. The ratio is the token's, for GSPO too.
    """
    return token_log_ratio(new_logprobs, old_logprobs.detach(), mask).exp() * kl


@torch.no_grad()
def reward_kl_penalty(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, config: LossConfig) -> Tensor:
    """beta * the sum over a row's tokens of the estimate of KL(old || reference), to subtract from the row's reward.

    With k1 that is beta * log old(row) / reference(row) (arXiv 2203.02155), as verl's and ms-swift's penalty in the
    reward. For `LossConfig.kl_in_reward`.

    Args:
        old_logprobs: [B, T] nats, of the policy that sampled the rows.
        ref_logprobs: [B, T] nats, of the frozen reference.
        mask: [B, T] bool, valid tokens.
        config: beta and the estimator.

    Returns:
        [B] in the dtype of the log-probabilities; 0 for an empty row.
    """
    estimate = reference_kl(old_logprobs, ref_logprobs, mask, config.kl_estimator_in_force)
    return config.beta * estimate.sum(dim=1)
