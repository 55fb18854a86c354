"""From ratios to importance weights: bounds, and what is done beyond them."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.bitmask import keep, keep_bits
from app.maths.correction.config import CorrectionConfig
from app.maths.correction.ratios import Ratios


def controlled_weights(ratios: Ratios, config: CorrectionConfig) -> Tensor:
    """Weights after control: truncated (Ionides 2008) or masked importance sampling.

    Returns:
        A new tensor, [B, T] or, where all tokens of a row have one weight, [B, 1]; not selected by the mask.
    """
    if config.level == "none":
        return torch.ones_like(ratios.clamped[:, :1])
    ratio = ratios.at(config.level)
    if config.control == "truncate":
        return ratio.clamp(min=config.lower, max=config.upper)
    beyond = [part for part in beyond_bounds(ratios, config) if part is not None]  # one of them or both
    bits = keep_bits(~(beyond[0] | beyond[-1]), ratio.dtype)
    return keep(ratio, bits)


def beyond_bounds(ratios: Ratios, config: CorrectionConfig) -> tuple[Tensor | None, Tensor | None]:
    """Where the ratio is above `upper`, and where below `lower`; None without such a bound.

    Returns:
        Two bool tensors, [B, T] if the bounds are tested on tokens, else [B, 1]; not selected by the mask.
    """
    level = "token" if config.level == "none" else config.level
    ratio = ratios.at(config.bound_level or level)
    above = None if config.upper is None else ratio > config.upper
    return above, None if config.lower is None else ratio < config.lower
