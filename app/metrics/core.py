"""The core: divergences, weights and what the correction changed, cheap enough for every step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from app.maths.bitmask import keep
from app.maths.correction import CorrectionConfig
from app.metrics.rows import Rows
from app.metrics.state import Schema
from app.metrics.token_values import Tile, largest, moments, smallest

MAX_K3 = 10.0
"""Each token's k3 term is capped here."""

CORE = Schema(
    sums=(
        # valid tokens are the mask's, tokens are those with a finite log-ratio; "m1" is "minus 1", "sq" is "squared"
        *("valid_tokens", "tokens", "missing", "nonfinite"),
        *("kl", "k3", "chi2", "abs_diff"),
        *("raw_m1", "raw_m1_sq", "weight_m1", "weight_m1_sq", "bounded_weight", "bounded_weight_sq"),
        # what the correction changed; bounded units are tokens or rows, by the level of the bound
        *("bounded_units", "clipped", "high_units", "clipped_high", "low_units", "clipped_low"),
        *("corrected_tokens", "corrected_rows", "lost_tokens", "lost_rows", "veto_units", "vetoed_rows"),
        # optional inputs
        *("off_policy_units", "off_policy_rows", "negative_units", "negative_off_policy_rows", "lag_units", "lag"),
    ),
    maxima=("abs_diff_max", "weight_max", "minus_weight_min", "raw_max"),
)
"""The entries; `app.metrics.table` says what is read from them."""


def token_sums(tile: Tile, config: CorrectionConfig | None) -> dict[str, Tensor]:
    """Return a tile's part of the CORE entries that are sums and extremes over tokens."""
    values = _divergence_sums(tile) | _weight_sums(tile, None if config is None else config.upper)
    if config is not None and config.level != "none" and config.bounds_tokens:
        values |= _clipped_tokens(tile, config)
    return values


def row_sums(tile: Tile, config: CorrectionConfig | None) -> dict[str, Tensor]:
    """Return a tile's sums over the tokens of each row [b], what `row_values` and `app.metrics.detail` read."""
    values = {
        "rows": tile.rows,
        "valid": tile.lengths,
        "counted": tile.counted_lengths,
        "missing": tile.missing,
        "difference": tile.row_difference,
    }
    if config is not None:
        assert tile.kept is not None
        assert tile.vetoed is not None
        kept = tile.lengths if tile.kept is tile.valid else tile.kept.sum(1, dtype=torch.int32)
        values |= {"kept": kept, "vetoed": tile.vetoed}
        if config.level != "none" and not config.bounds_tokens:
            beyond = (("high", tile.above), ("low", tile.below))
            values |= {name: part.any(1) for name, part in beyond if part is not None}
    return values


def row_values(sums: Mapping[str, Tensor], config: CorrectionConfig | None) -> dict[str, Tensor]:
    """Return the CORE entries that are read from `row_sums` of all rows with a valid token, [N] by name."""
    valid, counted, missing = (sums[name].sum() for name in ("valid", "counted", "missing"))
    values = {
        "valid_tokens": valid,
        "tokens": counted,
        "missing": missing,
        "nonfinite": valid - counted - missing,
        "kl": -sums["difference"].sum(),  # k1: Schulman, "Approximating KL divergence" (2020)
    }
    if config is not None:
        values |= _lost_values(sums, config)
        if config.level != "none":
            values |= _bounded_values(sums, config)
    return values


def _divergence_sums(tile: Tile) -> dict[str, Tensor]:
    """Divergences per token; k3: Schulman, "Approximating KL divergence" (2020)."""
    ratio_m1, ratio_m1_sq = tile.ratio_moments
    return {
        "k3": tile.k3.clamp(max=MAX_K3).sum(),
        "chi2": ratio_m1_sq + 2 * ratio_m1,  # rho^2 - 1 = (rho - 1)^2 + 2 (rho - 1)
        "abs_diff": tile.size.sum(),
        "abs_diff_max": largest(tile.size, tile.counted),
    }


def _weight_sums(tile: Tile, upper: float | None) -> dict[str, Tensor]:
    """Moments of ratios and weights; `bounded` weights are clamped to [1/upper, upper], as ms-swift does for ESS."""
    raw_m1, raw_m1_sq = tile.ratio_moments if tile.raw_m1 is tile.ratio_m1 else moments(tile.raw_m1)
    weight_m1, weight_m1_sq = moments(tile.weight_m1)
    bounded = tile.weight if upper is None else tile.weight.clamp(1 / upper, upper)
    bounded_weight, bounded_weight_sq = moments(keep(bounded, tile.bits))
    return {
        "raw_m1": raw_m1,
        "raw_m1_sq": raw_m1_sq,
        "raw_max": 1 + largest(tile.raw_m1, tile.counted),
        "weight_m1": weight_m1,
        "weight_m1_sq": weight_m1_sq,
        "weight_max": 1 + largest(tile.weight_m1, tile.counted),
        "minus_weight_min": -1 - smallest(tile.weight_m1, tile.counted),
        "bounded_weight": bounded_weight,
        "bounded_weight_sq": bounded_weight_sq,
    }


def _clipped_tokens(tile: Tile, config: CorrectionConfig) -> dict[str, Tensor]:
    """Tokens beyond the bounds; `clipped` are those above, and under control `mask` all, since all get weight 0."""
    values = {"clipped": tile.missing.new_zeros(())}
    for name, beyond in (("clipped_high", tile.above), ("clipped_low", tile.below)):
        if beyond is not None:
            values[name] = (beyond & tile.counted).sum()
            if name == "clipped_high" or config.control == "mask":
                values["clipped"] = values["clipped"] + values[name]
    return values


def _bounded_values(sums: Mapping[str, Tensor], config: CorrectionConfig) -> dict[str, Tensor]:
    """Rows beyond the bounds, and how many tokens or rows these are out of."""
    filled = sums["counted"] > 0
    units = sums["counted"].sum() if config.bounds_tokens else filled.sum()
    values = {"bounded_units": units}
    if config.upper is not None:
        values["high_units"] = units
    if config.lower is not None:
        values["low_units"] = units
    if not config.bounds_tokens:
        values |= {f"clipped_{name}": (sums[name] & filled).sum() for name in ("high", "low") if name in sums}
        values["clipped"] = values.get("clipped_high", units * 0)
    return values


def _lost_values(sums: Mapping[str, Tensor], config: CorrectionConfig) -> dict[str, Tensor]:
    """What rejection rules and veto dropped."""
    tokens, kept = sums["valid"].sum(), sums["kept"]
    values = {
        "corrected_tokens": tokens,
        "corrected_rows": (sums["valid"] > 0).sum(),
        "lost_tokens": tokens - kept.sum(),
        "lost_rows": (kept == 0).sum(),
    }
    if config.vetoes:
        values |= {"veto_units": values["corrected_rows"], "vetoed_rows": sums["vetoed"].sum()}
    return values


def row_input_sums(rows: Rows, filled: Tensor) -> dict[str, Tensor]:
    """Return the sums of the [B] tensors that were given, over the rows with a valid token, `filled` [N] int64."""
    values: dict[str, Tensor] = {}
    count = torch.tensor(len(filled), device=filled.device)
    if rows.policy_lag is not None:
        values |= {"lag_units": count, "lag": rows.policy_lag[filled].double().sum()}
    if rows.off_policy_keep is not None:
        dropped = ~rows.off_policy_keep[filled]
        values |= {"off_policy_units": count, "off_policy_rows": dropped.sum()}
        if rows.advantages is not None:
            negative = rows.advantages[filled] < 0
            values |= {"negative_units": negative.sum(), "negative_off_policy_rows": (dropped & negative).sum()}
    return values
