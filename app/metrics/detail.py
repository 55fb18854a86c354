"""The details: probabilities, rows, histograms and positions, for every n-th step."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.divergence import LOG_RATIO_BOUND
from app.metrics import histogram, position
from app.metrics.tile import Tile, largest
from app.metrics.vector import Layout

DETAIL = Layout(
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


def detail_vector(tile: Tile) -> Tensor:
    """Return the DETAIL vector of a tile."""
    values = {"tokens": tile.lengths.sum()}
    values |= _probability_sums(tile)
    values |= _row_sums(tile)
    if tile.rows.rewards is not None:
        values |= _reward_sums(tile, tile.rows.rewards)
    values |= position.position_sums(tile.gaps, tile.counted)
    counts = {"log_ratio": histogram.count(tile.log_ratio), "is_weight": histogram.count_weights(tile.weights)}
    return DETAIL.pack(values, counts)


def _probability_sums(tile: Tile) -> dict[str, Tensor]:
    """Moments of the two probabilities of a token about 1, and of their absolute difference."""
    old_m1, rollout_m1 = torch.expm1(tile.old), torch.expm1(tile.rollout)
    gap = (old_m1 - rollout_m1).abs()
    return {
        "old_prob_m1": old_m1.sum(),
        "old_prob_m1_sq": old_m1.dot(old_m1),
        "rollout_prob_m1": rollout_m1.sum(),
        "rollout_prob_m1_sq": rollout_m1.dot(rollout_m1),
        "prob_diff": gap.sum(),
        "prob_diff_sq": gap.dot(gap),
        "prob_diff_max": largest(gap),
    }


def _row_sums(tile: Tile) -> dict[str, Tensor]:
    """Statistics of the rows; one without a counted token is left out."""
    filled = tile.lengths > 0
    old, rollout, total, weight = (
        torch.segment_reduce(packed, "sum", lengths=tile.lengths)[filled]
        for packed in (tile.old, tile.rollout, tile.difference, tile.weights)
    )
    lengths = tile.lengths[filled]
    old_log_ppl, rollout_log_ppl, row_weight = -old / lengths, -rollout / lengths, weight / lengths
    log_ratio = total / lengths
    return {
        "rows": filled.sum(),
        "old_ppl": old_log_ppl.exp().sum(),
        "old_log_ppl": old_log_ppl.sum(),
        "rollout_ppl": rollout_log_ppl.exp().sum(),
        "rollout_log_ppl": rollout_log_ppl.sum(),
        "log_ppl_diff": -log_ratio.sum(),
        "log_ppl_abs_diff": log_ratio.abs().sum(),
        "log_ppl_diff_max": largest(-log_ratio),
        "minus_log_ppl_diff_min": largest(log_ratio),
        "ppl_ratio": torch.exp(-log_ratio).sum(),
        "chi2_geometric": torch.expm1(2 * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).sum(),
        "chi2_product": torch.expm1(2 * total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).sum(),
        "row_weight": row_weight.sum(),
        "row_weight_sq": row_weight.dot(row_weight),
    }


def _reward_sums(tile: Tile, rewards: Tensor) -> dict[str, Tensor]:
    """Moments of a row's mean log-ratio and its reward, over the rows that have both."""
    rewarded = (tile.lengths > 0) & rewards.isfinite()
    reward = rewards[rewarded].double()
    row_l = (torch.segment_reduce(tile.difference, "sum", lengths=tile.lengths) / tile.lengths)[rewarded]
    return {
        "reward_units": rewarded.sum(),
        "reward": reward.sum(),
        "reward_sq": reward.dot(reward),
        "row_l": row_l.sum(),
        "row_l_sq": row_l.dot(row_l),
        "row_l_reward": row_l.dot(reward),
    }
