"""The details: probabilities, rows, histograms and positions, for every n-th step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from app.maths.divergence import LOG_RATIO_BOUND
from app.metrics import histogram, position
from app.metrics.state import Schema
from app.metrics.token_values import Tile, largest, moments

DETAIL = Schema(
    sums=(
        # tokens and rows with a finite log-ratio in the detailed steps only
        *("tokens", "rows"),
        *("prob_diff", "prob_diff_sq", "old_prob_m1", "old_prob_m1_sq", "rollout_prob_m1", "rollout_prob_m1_sq"),
        *("old_ppl", "old_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio"),
        *("chi2_geometric", "chi2_product", "row_weight", "row_weight_sq"),
        *("reward_units", "reward", "reward_sq", "row_l", "row_l_sq", "row_l_reward"),
        *position.SUMS,
    ),
    histograms={"log_ratio": histogram.BINS, "is_weight": histogram.WEIGHT_BINS},
    maxima=("prob_diff_max", "log_ppl_diff_max", "minus_log_ppl_diff_min"),
)
"""The entries; `app.metrics.table` says what is read from them."""


class Details:
    """Adds up what tiles say of tokens, in forms that are cheap to add; `values` makes DETAIL entries of it once."""

    def __init__(self, mask: Tensor) -> None:
        """Start empty; `mask` [B, T] is that of all rows."""
        self._sums: list[dict[str, Tensor]] = []
        self._columns = mask.new_zeros((2, mask.shape[1]), dtype=torch.float64)
        self._log_ratios = histogram.Tally(histogram.RAW_BINS)
        self._weights = histogram.Tally(histogram.RAW_WEIGHT_BINS)
        self._places = 0

    def add(self, tile: Tile) -> None:
        """Add a tile."""
        self._sums.append(_probability_sums(tile))
        columns = self._columns[:, : tile.size.shape[1]]
        columns[0] += tile.size.sum(0)
        columns[1] += tile.counted.sum(0)
        self._log_ratios.add(histogram.raw_index(tile.log_ratio))
        self._weights.add(histogram.raw_weight_index(tile.weight))
        self._places += tile.counted.numel()

    def values(self) -> dict[str, Tensor]:
        """Return the sums and maxima over tokens."""
        return DETAIL.add_up(self._sums) | position.position_sums(self._columns)

    def counts(self) -> dict[str, Tensor]:
        """Return the histograms."""
        log_ratios = histogram.fold(self._log_ratios.counts())
        weights = histogram.fold_weights(self._weights.counts())
        idle = self._places - self._columns[1].sum().long()  # where no token counts: log-ratio 0 and weight 1
        log_ratios[histogram.ZERO_BIN] -= idle
        weights[histogram.WEIGHT_ONE_BIN] -= idle
        return {"log_ratio": log_ratios, "is_weight": weights}


def _probability_sums(tile: Tile) -> dict[str, Tensor]:
    """Moments of the two probabilities of a token about 1, and of their absolute difference."""
    rollout_prob = tile.rollout.exp()
    if tile.within_bound:  # p_old - p_rollout = p_rollout (exp(l) - 1): exact, and without an exponential of `old`
        gap = rollout_prob * tile.ratio_m1
    else:
        gap = tile.old.exp().sub_(rollout_prob)
    rollout_m1 = rollout_prob.sub_(1)
    old_m1 = rollout_m1 + gap
    gap = gap.abs_()
    values = {"prob_diff_max": largest(gap, tile.counted)}
    for name, data in {"old_prob_m1": old_m1, "rollout_prob_m1": rollout_m1, "prob_diff": gap}.items():
        values[name], values[f"{name}_sq"] = moments(data)
    return values


def row_sums(tile: Tile) -> dict[str, Tensor]:
    """Return a tile's sums over the counted tokens of each row [b], beside those of `app.metrics.core`."""
    return {"old": tile.old.sum(1), "rollout": tile.rollout.sum(1), "weight_m1": tile.weight_m1.sum(1)}


def row_values(sums: Mapping[str, Tensor], rewards: Tensor | None) -> dict[str, Tensor]:
    """Return the DETAIL entries that are read from both `row_sums` of all rows, [N] by name."""
    filled = sums["counted"] > 0  # a row without a counted token is left out
    rows, lengths, old, rollout, total, weight_m1 = (
        sums[name][filled] for name in ("rows", "counted", "old", "rollout", "difference", "weight_m1")
    )
    old_log_ppl, rollout_log_ppl, log_ratio = -old / lengths, -rollout / lengths, total / lengths
    row_weight, row_weight_sq = moments(1 + weight_m1 / lengths)
    values = {
        "tokens": lengths.sum(),
        "rows": filled.sum(),
        "old_ppl": old_log_ppl.exp().sum(),
        "old_log_ppl": old_log_ppl.sum(),
        "rollout_ppl": rollout_log_ppl.exp().sum(),
        "rollout_log_ppl": rollout_log_ppl.sum(),
        "log_ppl_diff": -log_ratio.sum(),
        "log_ppl_abs_diff": log_ratio.abs().sum(),
        "log_ppl_diff_max": _largest(-log_ratio),
        "minus_log_ppl_diff_min": _largest(log_ratio),
        "ppl_ratio": torch.exp(-log_ratio).sum(),
        "chi2_geometric": torch.expm1(2 * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).sum(),
        "chi2_product": torch.expm1(2 * total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).sum(),
        "row_weight": row_weight,
        "row_weight_sq": row_weight_sq,
    }
    return values if rewards is None else values | _reward_values(log_ratio, rewards[rows].double())


def _reward_values(row_l: Tensor, reward: Tensor) -> dict[str, Tensor]:
    """Moments of a row's mean log-ratio [N] and its reward [N], over the rows that have one."""
    rewarded = reward.isfinite()
    row_l, reward = row_l[rewarded], reward[rewarded]
    values = {"reward_units": rewarded.sum(), "row_l_reward": row_l.dot(reward)}
    values["reward"], values["reward_sq"] = moments(reward)
    values["row_l"], values["row_l_sq"] = moments(row_l)
    return values


def _largest(values: Tensor) -> Tensor:
    """Largest of [N], -inf of none (`amax` refuses an empty tensor)."""
    return values.amax() if values.numel() else values.new_tensor(-torch.inf)
