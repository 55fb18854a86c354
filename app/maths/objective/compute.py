"""The objective of a micro-batch: surrogate x importance weight + beta * KL to the reference, as one scalar."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.maths import aggregate, losses
from app.maths.divergence import kl_sampler_target_k3
from app.maths.masking import select
from app.maths.objective.config import LossConfig
from app.maths.objective.kl import bias_corrected_kl, reference_kl, token_log_ratio


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """One micro-batch's share of the objective, and sums for metrics that are reduced late."""

    loss: Tensor
    """Scalar with gradient: policy part + KL part. Shares of micro-batches and ranks add up to the whole."""
    policy_loss: Tensor
    """Scalar, detached: the policy part of `loss`."""
    kl_loss: Tensor
    """Scalar, detached: the KL part of `loss`, beta included; 0 under `kl_in_reward`."""
    clipped_low: Tensor
    """[B, T] bool: tokens in the loss that the lower clip acts on."""
    clipped_high: Tensor
    """[B, T] bool: tokens in the loss that the upper clip acts on."""
    approx_kl_sum: Tensor
    """Scalar, detached: sum over valid tokens, before rejection, of k3 of KL(old || new), in nats: the staleness."""
    ref_kl_sum: Tensor
    """Scalar, detached: sum over the same tokens of the estimator in force of KL(new || ref), unweighted; 0 without
    a reference."""
    token_count: Tensor
    """Scalar int64: those tokens, the denominator of both sums."""
    surrogate_tokens: Tensor
    """Scalar int64: tokens that the surrogate uses, with a weight other than 0."""
    trained_tokens: Tensor
    """Scalar int64: tokens that reach the loss, in its surrogate or its KL term, with a weight other than 0."""


@dataclass(frozen=True, kw_only=True)
class _Denominators:
    """What `policy_objective` divides by."""

    mask: Tensor
    """[B, T] bool: tokens that the loss is divided by."""
    total_tokens: int
    """Of the whole optimiser step, as the two below."""
    total_rows: int
    """Rows with a token in their mask."""
    micro_batches: int
    """Micro-batches of the optimiser step, over all ranks."""


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
    micro_batches: int = 1,
    denominator_mask: Tensor | None = None,
    kl_mask: Tensor | None = None,
    weight_kl: bool = True,
) -> LossParts:
    """Surrogate x is_weight + beta * KL(new || ref), over the kept tokens, divided by what the whole step holds.

    With `old_logprobs = new_logprobs.detach()`, a single update per rollout, every ratio is 1 and the gradient is
    REINFORCE's. If nothing is kept the loss is 0 and still has a (zero) gradient, so that no rank skips a backward.
    A token that is not kept has no gradient at all: GSPO's row ratio is that of the kept tokens, as in verl.

    Args:
        new_logprobs: [B, T] nats, with gradient.
        old_logprobs: [B, T] nats; under `bypass` the rollout's.
        mask: [B, T] bool, valid tokens before rejection.
        advantages: [B].
        is_weights: [B, T], `Correction.is_weights`. None: all 1.
        keep_mask: [B, T] bool, `Correction.mask`, and any further mask. None: all kept.
        ref_logprobs: [B, T] nats, of the frozen reference.
        config: which objective.
        total_tokens: tokens of the denominator in the whole optimiser step, over ranks and micro-batches.
        total_rows: rows with such a token in the same.
        micro_batches: of the same; for `micro_batch_token_mean`.
        denominator_mask: [B, T] bool, the tokens that these totals count, every kept one among them: row lengths and
            a micro-batch's tokens are taken from it. None: `mask`, as `denominator="all"` has it.
        kl_mask: [B, T] bool, the tokens of the KL term. None: `keep_mask`.
        weight_kl: `CorrectionConfig.weight_kl`: the weight multiplies the KL term too.

    Raises:
        ValueError: if the loss has a KL term but `ref_logprobs` is None, or shapes do not fit.
    """
    if config.kl_in_loss and ref_logprobs is None:
        raise ValueError(f"loss.beta={config.beta} needs ref_logprobs; load a reference model or set beta to 0.")
    kept = mask if keep_mask is None else mask & keep_mask
    kl_kept = kept if kl_mask is None else mask & kl_mask
    denominators = _Denominators(
        mask=mask if denominator_mask is None else denominator_mask,
        total_tokens=total_tokens,
        total_rows=total_rows,
        micro_batches=micro_batches,
    )
    surrogate = _surrogate(new_logprobs, old_logprobs, kept, advantages, config)
    loss = policy_loss = _aggregated(_weighted(surrogate.loss, is_weights, kept), config, denominators)

    kl_loss = ref_kl_sum = torch.zeros_like(policy_loss)
    kl_weights = is_weights if weight_kl else None
    if ref_logprobs is not None:
        kl = reference_kl(new_logprobs, ref_logprobs, mask, config.kl_estimator_in_force)
        ref_kl_sum = kl.detach().sum()
        if config.kl_in_loss:
            if config.use_bias_correction_kl:
                kl = bias_corrected_kl(kl, new_logprobs, old_logprobs, mask)
            kl_loss = config.beta * _aggregated(_weighted(kl, kl_weights, kl_kept), config, denominators)
            loss = policy_loss + kl_loss
    staleness = token_log_ratio(new_logprobs.detach(), old_logprobs.detach(), mask)
    trained = used = _with_weight(kept, is_weights)
    if config.kl_in_loss:
        trained = used | _with_weight(kl_kept, kl_weights)
    return LossParts(
        loss=loss,
        policy_loss=policy_loss.detach(),
        kl_loss=kl_loss.detach(),
        clipped_low=surrogate.clipped_low,
        clipped_high=surrogate.clipped_high,
        approx_kl_sum=kl_sampler_target_k3(staleness).sum(),
        ref_kl_sum=ref_kl_sum,
        token_count=mask.sum(),
        surrogate_tokens=used.sum(),
        trained_tokens=trained.sum(),
    )


def _surrogate(
    new_logprobs: Tensor, old_logprobs: Tensor, kept: Tensor, advantages: Tensor, config: LossConfig
) -> losses.Surrogate:
    """The surrogate the configuration names, with its parameters."""
    form = config.form
    if form.surrogate == "reinforce":
        return losses.reinforce(new_logprobs, kept, advantages)
    policies = (new_logprobs, old_logprobs, kept, advantages)
    if form.surrogate == "sapo":
        tau_pos, tau_neg = config.sapo_temperature_pos, config.sapo_temperature_neg
        return losses.sapo(*policies, temperature_pos=tau_pos, temperature_neg=tau_neg)
    low, high = form.epsilon_low, form.epsilon_high
    assert low is not None  # the table gives every clipped surrogate both
    assert high is not None
    if form.surrogate == "ppo_clip":
        return losses.ppo_clip(*policies, epsilon_low=low, epsilon_high=high, delta=config.delta)
    by_name = {"gspo": losses.gspo, "gspo_token": losses.gspo_token, "cispo": losses.cispo}
    return by_name[form.surrogate](*policies, epsilon_low=low, epsilon_high=high)


def _with_weight(kept: Tensor, is_weights: Tensor | None) -> Tensor:
    """The kept tokens [B, T] whose weight is not 0."""
    return kept if is_weights is None else kept & (is_weights != 0)


def _weighted(values: Tensor, is_weights: Tensor | None, kept: Tensor) -> Tensor:
    """Values x weights [B, T] at the kept tokens, 0 elsewhere; both are selected before they are multiplied."""
    values = select(values, kept)
    return values if is_weights is None else values * select(is_weights.detach(), kept)


def _aggregated(values: Tensor, config: LossConfig, denominators: _Denominators) -> Tensor:
    """The scalar the configuration's aggregation gives."""
    mask, aggregation = denominators.mask, config.form.aggregation
    if aggregation == "token_mean":
        return aggregate.token_mean(values, mask, denominators.total_tokens)
    if aggregation == "row_mean":
        return aggregate.row_mean(values, mask, denominators.total_rows)
    if aggregation == "micro_batch_token_mean":
        return aggregate.micro_batch_token_mean(values, mask, denominators.micro_batches)
    assert config.max_completion_length is not None  # LossConfig refuses constant_length without it
    return aggregate.constant_length(values, mask, denominators.total_rows, config.max_completion_length)
