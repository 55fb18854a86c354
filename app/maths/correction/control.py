"""From ratios to importance weights: bounds, and what is done beyond them."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.bitmask import keep, keep_bits
from app.maths.correction.config import CorrectionConfig
from app.maths.correction.ratios import Ratios


def controlled_weights(ratios: Ratios, config: CorrectionConfig) -> Tensor:
    """Weights after control: truncated (Ionides 2008) or masked importance sampling; less 1 if the ratios are.

    Returns:
        A new tensor, [B, T] or, where all tokens of a row have one weight, [B, 1]; not selected by the mask.
    """
    if config.level == "none":
        return torch.full_like(ratios.clamped[:, :1], 1 - ratios.shift)
    ratio = ratios.at(config.level)
    if config.control == "truncate":
        return ratio.clamp(min=_shifted(config.lower, ratios), max=_shifted(config.upper, ratios))
    beyond = [part for part in beyond_bounds(ratios, config) if part is not None]  # one of them or both
    bits = keep_bits(~(beyond[0] | beyond[-1]), ratio.dtype)
    return keep(ratio + 1, bits) - 1 if ratios.shift else keep(ratio, bits)


def beyond_bounds(ratios: Ratios, config: CorrectionConfig) -> tuple[Tensor | None, Tensor | None]:
    """Where the ratio is above `upper`, and where below `lower`; None without such a bound.

    Returns:
        Two bool tensors, [B, T] if the bounds are tested on tokens, else [B, 1]; not selected by the mask.
    """
    level = "token" if config.level == "none" else config.level
    ratio = ratios.at(config.bound_level or level)
    upper, lower = _shifted(config.upper, ratios), _shifted(config.lower, ratios)
    return None if upper is None else ratio > upper, None if lower is None else ratio < lower


def leaves_a_match_alone(config: CorrectionConfig) -> bool:
    """Whether a token with l = 0 has weight 1 whatever its row: then no masked position needs to be set to it."""
    by_token = config.level == "token" and config.bound_level in (None, "token")
    return by_token and (config.lower is None or config.lower <= 1) and (config.upper is None or config.upper >= 1)


def _shifted(bound: float | None, ratios: Ratios) -> float | None:
    return None if bound is None else bound - ratios.shift
