"""The core: divergences, weights and what the correction changed, cheap enough for every step."""

from __future__ import annotations

from torch import Tensor

from app.maths.correction import Correction, CorrectionConfig
from app.metrics.rows import Rows
from app.metrics.tile import Tile, largest
from app.metrics.vector import Layout

MAX_K3 = 10.0
"""Each token's k3 term is capped here."""

CORE = Layout(
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


def core_vector(tile: Tile, config: CorrectionConfig | None) -> Tensor:
    """Return the CORE vector of a tile."""
    missing = (tile.rows.mask & tile.rows.rollout_logprobs.isnan()).sum()
    valid, tokens = tile.rows.mask.sum(), tile.lengths.sum()
    values = {"valid_tokens": valid, "tokens": tokens, "missing": missing, "nonfinite": valid - tokens - missing}
    values |= _divergence_sums(tile)
    values |= _weight_sums(tile, None if config is None else config.upper)
    if config is not None and tile.correction is not None:
        values |= _lost_sums(tile, tile.correction, config)
        if config.level != "none":
            values |= _clipped_sums(tile.counted, tile.correction, config)
    values |= _row_input_sums(tile.rows, tile.valid_rows)
    return CORE.pack(values)


def _divergence_sums(tile: Tile) -> dict[str, Tensor]:
    """Divergences per token; k1, k2, k3: Schulman, "Approximating KL divergence" (2020)."""
    size = tile.difference.abs()
    return {
        "kl": -tile.difference.sum(),
        "k3": (tile.ratio_m1 - tile.log_ratio).clamp(max=MAX_K3).sum(),
        "chi2": (tile.ratio_m1 * (tile.ratio_m1 + 2)).sum(),
        "abs_diff": size.sum(),
        "abs_diff_max": largest(size),
    }


def _weight_sums(tile: Tile, upper: float | None) -> dict[str, Tensor]:
    """Moments of ratios and weights; `bounded` weights are clamped to [1/upper, upper], as ms-swift does for ESS."""
    raw_m1, weight_m1 = tile.raw_ratio - 1, tile.weights - 1
    bounded = tile.weights if upper is None else tile.weights.clamp(1 / upper, upper)
    return {
        "raw_m1": raw_m1.sum(),
        "raw_m1_sq": raw_m1.dot(raw_m1),
        "raw_max": largest(tile.raw_ratio),
        "weight_m1": weight_m1.sum(),
        "weight_m1_sq": weight_m1.dot(weight_m1),
        "weight_max": largest(tile.weights),
        "minus_weight_min": largest(-tile.weights),
        "bounded_weight": bounded.sum(),
        "bounded_weight_sq": bounded.dot(bounded),
    }


def _lost_sums(tile: Tile, found: Correction, config: CorrectionConfig) -> dict[str, Tensor]:
    """What rejection rules and veto dropped."""
    valid, rows, kept = tile.rows.mask.sum(), tile.valid_rows, found.measured_mask.sum(1)  # kept: [B] tokens
    values = {
        "corrected_tokens": valid,
        "corrected_rows": rows.sum(),
        "lost_tokens": valid - kept.sum(),
        "lost_rows": (rows & (kept == 0)).sum(),
    }
    if config.veto_low is not None or config.veto_high is not None:
        values |= {"veto_units": rows.sum(), "vetoed_rows": (found.vetoed & rows).sum()}
    return values


def _clipped_sums(counted: Tensor, found: Correction, config: CorrectionConfig) -> dict[str, Tensor]:
    """What lies beyond the bounds, in tokens or in rows by the level of the bound."""
    high, low, units = found.clipped_high & counted, found.clipped_low & counted, counted
    by_token = (config.bound_level or config.level) == "token"
    if not by_token:
        high, low, units = high.any(1), low.any(1), counted.any(1)
    clipped = high | low if by_token and config.control == "mask" else high
    values = {"bounded_units": units.sum(), "clipped": clipped.sum()}
    if config.upper is not None:
        values |= {"high_units": units.sum(), "clipped_high": high.sum()}
    if config.lower is not None:
        values |= {"low_units": units.sum(), "clipped_low": low.sum()}
    return values


def _row_input_sums(rows: Rows, valid: Tensor) -> dict[str, Tensor]:
    """Sums of the [B] tensors that were given, over the rows with a valid token ([B] bool)."""
    values: dict[str, Tensor] = {}
    if rows.policy_lag is not None:
        values |= {"lag_units": valid.sum(), "lag": rows.policy_lag[valid].double().sum()}
    if rows.off_policy_keep is not None:
        dropped = valid & ~rows.off_policy_keep
        values |= {"off_policy_units": valid.sum(), "off_policy_rows": dropped.sum()}
        if rows.advantages is not None:
            negative = valid & (rows.advantages < 0)
            values |= {"negative_units": negative.sum(), "negative_off_policy_rows": (dropped & negative).sum()}
    return values
