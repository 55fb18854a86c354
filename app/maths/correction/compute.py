"""The correction itself: from two policies' log-probabilities to importance weights and an edited mask.

Notation: l = old - rollout, the log-ratio train / rollout of a valid token; a missing token has l = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.maths.bitmask import keep, keep_, keep_bits
from app.maths.correction.config import CorrectionConfig
from app.maths.correction.control import beyond_bounds, controlled_weights
from app.maths.correction.ratios import Ratios
from app.maths.correction.rejection import kept_tokens
from app.maths.tiling import Tile, one_thread, row_tiles


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What a correction made of a batch: what the loss uses, and what the metrics measure of the same.

    No tensor carries a gradient; floats have the input's dtype. Under `log_only` the loss uses ones and the given mask,
    and the measured fields are those of the correction that would have been.
    """

    config: CorrectionConfig
    """The settings that it was computed by."""
    is_weights: Tensor
    """[B, T] importance weights that the loss uses, before rejection; 0 where masked. Ones under `log_only`."""
    mask: Tensor
    """[B, T] bool: tokens left for the loss after rejection and veto. The given mask under `log_only`."""
    normalizer: Tensor
    """Scalar: the mean the weights were divided by; 1 without `batch_normalize` and under `log_only`."""
    controlled: Tensor
    """[B, T] weights after control, before normalisation and rejection; 0 where masked. Measured."""
    kept: Tensor
    """[B, T] bool: valid tokens that neither a rejection rule nor the veto drops. Measured."""
    vetoed: Tensor
    """[B] bool: rows that the veto drops. Measured."""
    above: Tensor | None
    """[B, T] bool: valid tokens whose ratio, or whose row's at row levels, is above `upper`. None: no such bound."""
    below: Tensor | None
    """[B, T] bool: valid tokens whose ratio, or whose row's at row levels, is below `lower`. None: no such bound."""


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
    here as `old_logprobs`, so that rejection still sees the mismatch.

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
    dtype = torch.promote_types(old_logprobs.dtype, rollout_logprobs.dtype)
    weights, kept = torch.zeros_like(mask, dtype=dtype), torch.zeros_like(mask) if config.drops else mask.clone()
    vetoed = mask.new_zeros(len(mask))
    beyond = [None if bound is None else torch.zeros_like(mask) for bound in (config.upper, config.lower)]
    sums = torch.zeros(2, dtype=torch.float64, device=mask.device)
    with one_thread():
        for tile in row_tiles(mask):
            ratios, bits = _read(tile, old_logprobs, rollout_logprobs, mask)
            found = keep(controlled_weights(ratios, config), bits)
            tile.paste(found, weights)
            for part, place in zip(beyond_bounds(ratios, config), beyond, strict=True):
                if part is not None and place is not None:
                    tile.paste(part & ratios.mask, place)
            if config.drops:
                left, vetoed[tile.rows] = kept_tokens(ratios, config)
                tile.paste(left, kept)
            if config.batch_normalize and normalizer is None:
                sums += weight_sums(found, ratios.mask, config)
    used, left, divisor = weights, kept, torch.ones((), dtype=dtype, device=mask.device)
    if config.log_only:
        used, left = mask.to(dtype), mask.clone()
    elif config.batch_normalize:
        divisor = torch.as_tensor(mean_weight(sums) if normalizer is None else normalizer).to(divisor)
        used = weights / divisor
    return Correction(
        config=config,
        is_weights=used,
        mask=left,
        normalizer=divisor,
        controlled=weights,
        kept=kept,
        vetoed=vetoed,
        above=beyond[0],
        below=beyond[1],
    )


def _read(tile: Tile, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Ratios, Tensor]:
    """The ratios of a tile, and its valid tokens as the bits of `keep`."""
    valid = tile.cut(mask)
    log_ratio = tile.cut(old_logprobs) - tile.cut(rollout_logprobs)
    bits = keep_bits(valid, log_ratio.dtype)
    keep_(log_ratio, bits)
    if not log_ratio.sum().isfinite():  # a NaN may be there: a missing token, or the difference of two infinities
        keep_(log_ratio, keep_bits(~log_ratio.isnan(), log_ratio.dtype))
    return Ratios(log_ratio, valid), bits


@torch.no_grad()
def weight_sums(weights: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Sum and count of the weights of a batch, to add over micro-batches and ranks for `mean_weight`.

    Token weights are counted by valid token; for row levels every non-empty row counts once, whatever its length.

    Args:
        weights: [B, T] before any normalisation, 0 where masked: `is_weights` of `correct(..., normalizer=1.0)`.
        mask: [B, T] bool, the valid tokens.
        config: its level.

    Returns:
        [2] float64: sum, count.
    """
    totals, lengths = weights.sum(1, dtype=torch.float64), mask.sum(1, dtype=torch.int32)
    if config.level == "token":
        return torch.stack([totals.sum(), lengths.sum().double()])
    return torch.stack([(totals / lengths.clamp(min=1)).sum(), (lengths > 0).sum().double()])


def mean_weight(sums: Tensor) -> Tensor:
    """The mean [] float64 of added `weight_sums`; 1 if it is 0, because every weight was masked to 0 or none is there.

    Dividing by it is the self-normalised importance sampling of verl's `rollout_is_batch_normalize`.
    """
    mean = sums[0] / sums[1].clamp(min=1)
    return torch.where(mean > 1e-8, mean, torch.ones_like(mean))


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
