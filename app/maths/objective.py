"""The training objective: surrogate x importance weight + beta * KL to the reference, aggregated to a scalar."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from app.maths import aggregate, losses
from app.maths.divergence import LOG_RATIO_BOUND, kl_sampler_target_k1, kl_sampler_target_k2, kl_sampler_target_k3
from app.maths.masking import select

Loss = Literal["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce"]
Aggregation = Literal["token_mean", "row_mean", "constant_length"]
KLEstimator = Literal["k1", "k2", "k3"]

_KL_ESTIMATORS = {"k1": kl_sampler_target_k1, "k2": kl_sampler_target_k2, "k3": kl_sampler_target_k3}


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Which objective is minimised. Names are TRL's where it has the same thing.

    Raises:
        ValueError: a setting that is unknown, out of range or contradicts another; the message names the key.
    """

    loss: Loss = "ppo_clip"
    """Per-token surrogate, see `app.maths.losses`."""
    epsilon_low: float = 0.2
    """The ratio is clipped at 1 - epsilon_low. GSPO wants about 3e-4."""
    epsilon_high: float = 0.2
    """The ratio is clipped at 1 + epsilon_high. DAPO uses 0.28, GSPO 4e-4."""
    delta: float | None = None
    """Largest ratio where the advantage is negative (ppo_clip only), above 1 + epsilon_high. None: unbounded."""
    sapo_temperature_pos: float = 1.0
    """SAPO's tau for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """SAPO's tau for the others."""
    aggregation: Aggregation = "token_mean"
    """From tokens to a scalar: `token_mean` DAPO, `row_mean` GRPO, `constant_length` Dr. GRPO."""
    max_completion_length: int | None = None
    """Tokens a completion may have; the divisor of `constant_length`, unused otherwise."""
    beta: float = 0.0
    """Weight of KL(new || reference). 0: no penalty."""
    kl_estimator: KLEstimator = "k3"
    """Per-token estimator of that KL, see `app.maths.divergence`. k1 has no expected gradient on-policy."""

    def __post_init__(self) -> None:
        for name, kind in (("loss", Loss), ("aggregation", Aggregation), ("kl_estimator", KLEstimator)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"loss.{name}={value!r} is unknown; choose one of {', '.join(get_args(kind))}.")
        if not 0 <= self.epsilon_low <= 1:
            raise ValueError(f"loss.epsilon_low={self.epsilon_low}: 1 - epsilon_low must lie between 0 and 1.")
        if not self.epsilon_high >= 0:
            raise ValueError(f"loss.epsilon_high={self.epsilon_high} must be 0 or more.")
        if self.delta is not None and self.loss != "ppo_clip":
            raise ValueError(f"loss.delta={self.delta} does nothing with loss {self.loss!r}; it belongs to 'ppo_clip'.")
        if self.delta is not None and not self.delta > 1 + self.epsilon_high:
            raise ValueError(f"loss.delta={self.delta} must be above 1 + epsilon_high = {1 + self.epsilon_high}.")
        if not (self.sapo_temperature_pos > 0 and self.sapo_temperature_neg > 0):
            raise ValueError("loss.sapo_temperature_pos and loss.sapo_temperature_neg must be above 0.")
        if self.aggregation == "constant_length" and not (self.max_completion_length or 0) > 0:
            raise ValueError("loss.aggregation='constant_length' needs loss.max_completion_length, in tokens.")
        if not self.beta >= 0:
            raise ValueError(f"loss.beta={self.beta} must be 0 or more.")


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """One micro-batch's share of the objective, and sums for metrics that are reduced late."""

    loss: Tensor
    """Scalar with gradient: policy part + KL part. Shares of micro-batches and ranks add up to the whole."""
    policy_loss: Tensor
    """Scalar, detached: the policy part of `loss`."""
    kl_loss: Tensor
    """Scalar, detached: the KL part of `loss`, beta included."""
    clipped_low: Tensor
    """[B, T] bool: tokens in the loss that the lower clip acts on."""
    clipped_high: Tensor
    """[B, T] bool: tokens in the loss that the upper clip acts on."""
    approx_kl_sum: Tensor
    """Scalar, detached: sum over valid tokens, before rejection, of k3 of KL(old || new), in nats: the staleness."""
    ref_kl_sum: Tensor
    """Scalar, detached: sum over the same tokens of the chosen estimator of KL(new || ref), unweighted; 0 without
    a reference."""
    token_count: Tensor
    """Scalar int64: those tokens, the denominator of both sums."""


def policy_objective(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    is_weights: Tensor | None,
    keep_mask: Tensor | None,
    ref_logprobs: Tensor | None = None,
    config: LossConfig,
    total_tokens: int,
    total_rows: int,
    weight_kl: bool = True,
) -> LossParts:
    """Surrogate x is_weight + beta * KL(new || ref), over the kept tokens, divided by what the whole step holds.

    With `old_logprobs = new_logprobs.detach()`, a single update per rollout, every ratio is 1 and the gradient is
    REINFORCE's. If nothing is kept the loss is 0 and still has a (zero) gradient, so that no rank skips a backward.

    Args:
        new_logprobs: [B, T] nats, with gradient.
        old_logprobs: [B, T] nats; under `bypass` the rollout's.
        mask: [B, T] bool, valid tokens before rejection: they are the lengths in the denominators.
        advantages: [B].
        is_weights: [B, T], `Correction.is_weights`. None: all 1.
        keep_mask: [B, T] bool, `Correction.mask`, and any further mask. None: all kept.
        ref_logprobs: [B, T] nats, of the frozen reference.
        config: which objective.
        total_tokens: valid tokens of the whole optimiser step, over ranks and micro-batches.
        total_rows: non-empty rows of the same.
        weight_kl: `CorrectionConfig.weight_kl`: the weight multiplies the KL term too.

    Raises:
        ValueError: if beta is above 0 without `ref_logprobs`, or shapes do not fit.
    """
    if config.beta > 0 and ref_logprobs is None:
        raise ValueError(f"loss.beta={config.beta} needs ref_logprobs; load a reference model or set beta to 0.")
    kept = mask if keep_mask is None else mask & keep_mask
    surrogate = _surrogate(new_logprobs, old_logprobs, kept, advantages, config)
    policy = _weighted(surrogate.loss, is_weights, kept)
    loss = policy_loss = _aggregated(policy, mask, config, total_tokens, total_rows)

    kl_loss = ref_kl_sum = torch.zeros_like(policy_loss)
    if ref_logprobs is not None:
        kl = _reference_kl(new_logprobs, ref_logprobs, mask, config.kl_estimator)
        ref_kl_sum = kl.detach().sum()
        if config.beta > 0:
            kl = _weighted(kl, is_weights if weight_kl else None, kept)
            kl_loss = config.beta * _aggregated(kl, mask, config, total_tokens, total_rows)
            loss = policy_loss + kl_loss
    drift = _log_ratio(new_logprobs.detach(), old_logprobs.detach(), mask)
    return LossParts(
        loss=loss,
        policy_loss=policy_loss.detach(),
        kl_loss=kl_loss.detach(),
        clipped_low=surrogate.clipped_low,
        clipped_high=surrogate.clipped_high,
        approx_kl_sum=kl_sampler_target_k3(drift).sum(),
        ref_kl_sum=ref_kl_sum,
        token_count=mask.sum(),
    )


def _surrogate(
    new_logprobs: Tensor, old_logprobs: Tensor, kept: Tensor, advantages: Tensor, config: LossConfig
) -> losses.Surrogate:
    """The surrogate the configuration names, with its parameters."""
    if config.loss == "reinforce":
        return losses.reinforce(new_logprobs, kept, advantages)
    policies = (new_logprobs, old_logprobs, kept, advantages)
    if config.loss == "sapo":
        tau_pos, tau_neg = config.sapo_temperature_pos, config.sapo_temperature_neg
        return losses.sapo(*policies, temperature_pos=tau_pos, temperature_neg=tau_neg)
    low, high = config.epsilon_low, config.epsilon_high
    if config.loss == "ppo_clip":
        return losses.ppo_clip(*policies, epsilon_low=low, epsilon_high=high, delta=config.delta)
    by_name = {"gspo": losses.gspo, "gspo_token": losses.gspo_token, "cispo": losses.cispo}
    return by_name[config.loss](*policies, epsilon_low=low, epsilon_high=high)


def _log_ratio(target: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """log target / sampler [B, T], 0 where masked, clamped so that its exp stays finite."""
    return select(target - sampler, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _reference_kl(new_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate [B, T] of KL(new || ref), with gradient through `new_logprobs`."""
    return _KL_ESTIMATORS[estimator](_log_ratio(ref_logprobs, new_logprobs, mask))


def _weighted(values: Tensor, is_weights: Tensor | None, kept: Tensor) -> Tensor:
    """Values x weights [B, T] at the kept tokens, 0 elsewhere; both are selected before they are multiplied."""
    values = select(values, kept)
    return values if is_weights is None else values * select(is_weights.detach(), kept)


def _aggregated(values: Tensor, mask: Tensor, config: LossConfig, total_tokens: int, total_rows: int) -> Tensor:
    """The scalar the configuration's aggregation gives."""
    if config.aggregation == "token_mean":
        return aggregate.token_mean(values, mask, total_tokens)
    if config.aggregation == "row_mean":
        return aggregate.row_mean(values, mask, total_rows)
    assert config.max_completion_length is not None  # LossConfig refuses constant_length without it
    return aggregate.constant_length(values, mask, total_rows, config.max_completion_length)
