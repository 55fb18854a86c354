"""The correction itself: from two policies' log-probabilities to importance weights and an edited mask.

Notation: l = old - rollout, the log-ratio train / rollout of a valid token; a missing token has l = 0.
"""

from __future__ import annotations

from collections.abc import Callable
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
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Correction:
    """Turn the mismatch of two policies into importance weights and an edited mask.

    Under `bypass` the loss uses the rollout policy as old policy; pass the trainer's current log-probabilities
    here as `old_logprobs`, so that rejection and diagnostics still see the mismatch.

    Args:
        old_logprobs: [B, T] nats, the trainer's, float32 or float64.
        rollout_logprobs: [B, T] nats, the engine's; NaN where one value is missing: that token gets ratio 1.
        mask: [B, T] bool, the valid tokens. Whatever stands at other positions is never read.
        config: what to do.
        reduce: sums a float64 tensor of shape [2] over all ranks, for `batch_normalize`; None: this process is
            alone. It is called once on every rank, whatever the data.

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
    normalizer = weights.new_ones(())
    if config.batch_normalize:
        normalizer = _global_mean(weights, mask, by_row=config.level != "token", reduce=reduce)
        weights = weights / normalizer

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
        normalizer=normalizer,
    )


def _controlled(ratio: Tensor, outside: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Weights [B, T] after control: truncated (Ionides 2008) or masked importance sampling; 0 where masked."""
    if config.level == "none":
        return mask.to(ratio.dtype)
    if config.control == "truncate":
        return select(ratio.clamp(min=config.lower, max=config.upper), mask)
    return select(ratio, mask & ~outside)


def _global_mean(weights: Tensor, mask: Tensor, by_row: bool, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Mean weight over all ranks' valid tokens, or over their non-empty rows; 1 if there is nothing to divide by."""
    if by_row:
        counted = mask.any(dim=1)
        total = masked_mean(weights, mask, dim=1).sum()
    else:
        counted = mask
        total = masked_sum(weights, mask)
    sums = torch.stack([total.double(), counted.sum().double()])
    if reduce is not None:
        sums = reduce(sums)
    mean = (sums[0] / sums[1].clamp(min=1)).to(weights.dtype)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))  # every weight masked to 0: 0 / 0 otherwise


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
