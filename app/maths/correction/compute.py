"""The correction itself: from two policies' log-probabilities to importance weights and an edited mask.

Notation: l = old - rollout, the log-ratio train / rollout of a valid token; a missing token has l = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.maths.correction.config import CorrectionConfig
from app.maths.correction.ratios import Ratios
from app.maths.correction.rejection import rejected_tokens, vetoed_rows
from app.maths.masking import masked_mean, masked_sum, select


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What `correct` found and decided. No tensor carries a gradient; floats have the input's dtype."""

    is_weights: Tensor
    """[B, T] importance weights for the loss, before rejection; 0 where masked. Ones under `log_only`."""
    mask: Tensor
    """[B, T] bool: tokens left for the loss after rejection and veto. The given mask under `log_only`."""
    valid: Tensor
    """[B, T] bool: the mask given, before rejection."""
    known: Tensor
    """[B, T] bool: valid tokens with a log-ratio. Diagnostics count these; a missing (NaN) token is not among them."""
    log_ratio: Tensor
    """[B, T] l, clamped to [-20, 20]; 0 where masked or missing."""
    raw_ratio: Tensor
    """[B, T] ratio at `level` before control, a row's value at each of its tokens; the token ratio at level none;
    0 where masked."""
    bound_ratio: Tensor
    """[B, T] likewise at the level where the bounds are tested."""
    measured_weights: Tensor
    """[B, T] the weights the configuration asks for: `is_weights`, except under `log_only`."""
    measured_mask: Tensor
    """[B, T] bool: the mask the configuration asks for: `mask`, except under `log_only`."""
    clipped_high: Tensor
    """[B, T] bool: valid tokens whose `bound_ratio` is above `upper`. For a row level, the whole row."""
    clipped_low: Tensor
    """[B, T] bool: valid tokens whose `bound_ratio` is below `lower`. For a row level, the whole row."""
    rejected: Tensor
    """[B, T] bool: valid tokens dropped by a rejection rule, the veto not counted."""
    vetoed: Tensor
    """[B] bool: rows dropped by the veto."""
    normalizer: Tensor
    """Scalar: the mean the weights were divided by; 1 without `batch_normalize`."""


@torch.no_grad()
def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    config: CorrectionConfig,
    normalizer: Tensor | float | None = None,
) -> Correction:
    """Turn the mismatch of two policies into importance weights and an edited mask.

    Under `bypass` the loss uses the rollout policy as old policy; pass the trainer's current log-probabilities
    here as `old_logprobs`, so that rejection and diagnostics still see the mismatch.

    Args:
        old_logprobs: [B, T] nats, the trainer's, float32 or float64.
        rollout_logprobs: [B, T] nats, the engine's; NaN where one value is missing: that token gets ratio 1.
        mask: [B, T] bool, the valid tokens. Whatever stands at other positions is never read.
        config: what to do.
        normalizer: the mean weight of the whole optimiser step, which `batch_normalize` divides by; it is read under
            that alone. None: the mean over this batch. See `weight_sums`.

    Raises:
        ValueError: on shapes or dtypes that do not fit.
    """
    _check_inputs(old_logprobs, rollout_logprobs, mask)
    log_ratio = old_logprobs - rollout_logprobs
    known = mask & ~log_ratio.isnan()
    ratios = Ratios(select(log_ratio, known), mask)

    level = "token" if config.level == "none" else config.level
    bound_ratio = ratios.at(config.bound_level or level)
    nowhere = torch.zeros_like(mask)
    clipped_high = mask & (bound_ratio > config.upper) if config.upper is not None else nowhere
    clipped_low = mask & (bound_ratio < config.lower) if config.lower is not None else nowhere
    weights = _controlled(ratios.at(level), clipped_low | clipped_high, mask, config)
    divisor = weights.new_ones(())
    if config.batch_normalize:
        mean = mean_weight(weight_sums(weights, mask, config)) if normalizer is None else normalizer
        divisor = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
        weights = weights / divisor

    rejected = rejected_tokens(ratios, mask, config.rejection)
    vetoed = vetoed_rows(ratios.log_ratio, mask, config.veto_low, config.veto_high)
    kept = mask & ~rejected & ~vetoed[:, None]
    return Correction(
        is_weights=mask.to(weights.dtype) if config.log_only else weights,
        mask=mask.clone() if config.log_only else kept,
        valid=mask,
        known=known,
        log_ratio=ratios.clamped,
        raw_ratio=select(ratios.at(level), mask),
        bound_ratio=select(bound_ratio, mask),
        measured_weights=weights,
        measured_mask=kept,
        clipped_high=clipped_high,
        clipped_low=clipped_low,
        rejected=rejected,
        vetoed=vetoed,
        normalizer=divisor,
    )


@torch.no_grad()
def weight_sums(weights: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Sum and count of the weights of a batch, to add over micro-batches and ranks for `mean_weight`.

    Token weights are counted by valid token; for row levels every non-empty row counts once, whatever its length.

    Args:
        weights: [B, T] before any normalisation: `measured_weights` of `correct(..., normalizer=1.0)`.
        mask: [B, T] bool, the valid tokens.
        config: its level.

    Returns:
        [2] float64: sum, count.
    """
    if config.level == "token":
        counted, total = mask, masked_sum(weights.double(), mask)
    else:
        counted, total = mask.any(dim=1), masked_mean(weights.double(), mask, dim=1).sum()
    return torch.stack([total, counted.sum().double()])


def mean_weight(sums: Tensor) -> Tensor:
    """The mean [] float64 of added `weight_sums`; 1 if it is 0, because every weight was masked to 0 or none is there.

    Dividing by it is the self-normalised importance sampling of verl's `rollout_is_batch_normalize`.
    """
    mean = sums[0] / sums[1].clamp(min=1)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))


def _controlled(ratio: Tensor, outside: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Weights [B, T] after control: truncated (Ionides 2008) or masked importance sampling; 0 where masked."""
    if config.level == "none":
        return mask.to(ratio.dtype)
    if config.control == "truncate":
        return select(ratio.clamp(min=config.lower, max=config.upper), mask)
    return select(ratio, mask & ~outside)


def _check_inputs(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in (old_logprobs, rollout_logprobs, mask)}
    if len(shapes) != 1 or mask.dim() != 2:
        raise ValueError(
            f"old_logprobs {tuple(old_logprobs.shape)}, rollout_logprobs {tuple(rollout_logprobs.shape)} and "
            f"mask {tuple(mask.shape)} must have one shape [B, T]."
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}.")
    for name, tensor in (("old_logprobs", old_logprobs), ("rollout_logprobs", rollout_logprobs)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float32 or float64, got {tensor.dtype}: rounded log-probabilities would show a "
                f"mismatch that is not there; keep them out of mixed-precision casts."
            )
