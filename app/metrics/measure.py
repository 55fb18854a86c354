"""From the tensors of some rows to the vector of sums, counts and extremes that all diagnostics are read from.

Everything is summed in float64 and in a form that does not cancel: chi-squared as expm1(2l), k3 as expm1(l) - l,
weights and ratios as their distance from 1, probabilities as their distance from 1 (most sampled tokens are near
1), and the covariance of two nearly equal probabilities through the variance of their difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from app.maths.correction import CorrectionConfig, correct
from app.maths.divergence import LOG_RATIO_BOUND
from app.metrics import histogram
from app.metrics.vector import Layout

MAX_K3 = 10.0
"""Each token's k3 term is capped here."""

LAYOUT = Layout(
    sums=(
        # counts: valid tokens and rows are the mask's, tokens and rows are those with a finite log-ratio
        *("valid_tokens", "valid_rows", "tokens", "rows", "missing", "nonfinite"),
        # tokens: "m1" is "minus 1", "sq" is "squared"
        *("kl", "k3", "chi2", "abs_diff", "prob_diff", "prob_diff_sq"),
        *("old_prob_m1", "old_prob_m1_sq", "rollout_prob_m1", "rollout_prob_m1_sq"),
        *("raw_m1", "weight_m1", "weight_m1_sq", "bounded_weight", "bounded_weight_sq"),
        # rows
        *("old_ppl", "old_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio"),
        *("chi2_geometric", "chi2_product", "row_weight", "row_weight_sq"),
        # what the correction changed; bounded units are tokens or rows, by the level of the bound
        *("bounded_units", "clipped", "high_units", "clipped_high", "low_units", "clipped_low"),
        *("corrected_tokens", "corrected_rows", "lost_tokens", "lost_rows", "veto_units", "vetoed_rows"),
        # optional inputs
        *("off_policy_units", "off_policy_rows", "negative_units", "negative_off_policy_rows"),
        *("lag_units", "lag"),
        *("reward_units", "reward", "reward_sq", "row_l", "row_l_sq", "row_l_reward"),
    ),
    maxima=(
        *("abs_diff_max", "prob_diff_max", "weight_max", "minus_weight_min"),
        *("log_ppl_diff_max", "minus_log_ppl_diff_min"),
    ),
    bins=histogram.BINS,
)
"""The entries; `app.metrics.table` says what is read from them."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows to be measured. Masked positions are never read, whatever stands there.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the tensor.
    """

    old_logprobs: Tensor
    """[B, T] nats, the trainer's at sampling time."""
    rollout_logprobs: Tensor
    """[B, T] nats, the engine's; NaN where one is missing."""
    mask: Tensor
    """[B, T] bool: the valid tokens."""
    rewards: Tensor | None = None
    """[B]; a row whose reward is not finite is left out of the correlation."""
    advantages: Tensor | None = None
    """[B]; only the sign is used."""
    off_policy_keep: Tensor | None = None
    """[B] bool: False where the off-policy sequence mask dropped the row."""
    policy_lag: Tensor | None = None
    """[B] weight versions between the policy that sampled a row and the one trained."""

    def __post_init__(self) -> None:
        shape = tuple(self.mask.shape)
        if len(shape) != 2 or self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool [B, T], got {self.mask.dtype} {shape}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = shape if field.name.endswith("logprobs") else shape[:1]
            if field.name != "mask" and value is not None and tuple(value.shape) != wanted:
                raise ValueError(f"{field.name} has shape {tuple(value.shape)}, expected {wanted} (mask: {shape}).")
        if self.off_policy_keep is not None and self.off_policy_keep.dtype != torch.bool:
            raise ValueError(f"off_policy_keep must be bool, got {self.off_policy_keep.dtype}.")
        for name in ("old_logprobs", "rollout_logprobs"):
            if (dtype := getattr(self, name).dtype) not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} must be float32 or float64, got {dtype}: rounded log-probabilities would show a mismatch "
                    f"that is not there; keep them out of mixed-precision casts."
                )

    def tiles(self) -> Iterator[Rows]:
        """Yield the rows in pieces that fit the cache (a CPU) or a modest share of memory (an accelerator)."""
        tokens = 1 << 16 if self.mask.device.type == "cpu" else 1 << 22
        count, width = self.mask.shape
        step = max(1, tokens // max(1, width))
        given = {name: value for name, value in vars(self).items() if value is not None}
        for start in range(0, count, step):
            yield Rows(**{name: value[start : start + step] for name, value in given.items()})


@torch.no_grad()
def measure(rows: Rows, config: CorrectionConfig | None) -> Tensor:
    """Return the vector (see LAYOUT) of all `rows`, in one pass over tiles of them."""
    vector = LAYOUT.empty(rows.mask.device)
    with one_thread():
        for tile in rows.tiles():
            vector = LAYOUT.merge(torch.stack([vector, _measure_tile(tile, config)]))
    return vector


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep CPU operations on the calling thread.

    A tile is too small to share out: where other processes want the cores too, waiting for the threads to meet
    after each of some hundred operations takes up to a hundred times as long as the work.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measure_tile(rows: Rows, config: CorrectionConfig | None) -> Tensor:
    old, rollout = rows.old_logprobs.double(), rows.rollout_logprobs.double()
    difference = old - rollout
    counted = rows.mask & difference.isfinite()
    where = counted.flatten().nonzero().squeeze(1)
    lengths = counted.sum(1)
    tokens = {
        "old": old.flatten()[where],
        "rollout": rollout.flatten()[where],
        "difference": difference.flatten()[where],
    }
    log_ratio = tokens["difference"].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_m1 = torch.expm1(log_ratio)
    missing = (rows.mask & rows.rollout_logprobs.isnan()).sum()
    valid = rows.mask.sum()
    values = {
        "valid_tokens": valid,
        "valid_rows": rows.mask.any(1).sum(),
        "tokens": lengths.sum(),
        "missing": missing,
        "nonfinite": valid - lengths.sum() - missing,
    }
    values |= _token_sums(tokens["difference"], log_ratio, ratio_m1)
    values |= _probability_sums(tokens["old"], tokens["rollout"])
    weights = raw = ratio_m1 + 1
    if config is not None:
        weights, raw, changed = _correction_sums(rows, old, rollout, counted, where, config, weights)
        values |= changed
    values |= _weight_sums(weights, raw, None if config is None else config.upper)
    values |= _row_sums(tokens, weights, lengths)
    values |= _optional_sums(rows, tokens["difference"], lengths)
    return LAYOUT.pack(values, histogram.count(log_ratio))


def _token_sums(difference: Tensor, log_ratio: Tensor, ratio_m1: Tensor) -> dict[str, Tensor]:
    """Divergences per token, [N] each; k1, k2, k3: Schulman, "Approximating KL divergence" (2020)."""
    size = difference.abs()
    return {
        "kl": -difference.sum(),
        "k3": (ratio_m1 - log_ratio).clamp(max=MAX_K3).sum(),
        "chi2": (ratio_m1 * (ratio_m1 + 2)).sum(),
        "abs_diff": size.sum(),
        "abs_diff_max": _max(size),
    }


def _probability_sums(old: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """Moments of the two probabilities of a token about 1, and of their absolute difference."""
    old_m1, rollout_m1 = torch.expm1(old), torch.expm1(rollout)
    gap = (old_m1 - rollout_m1).abs()
    return {
        "old_prob_m1": old_m1.sum(),
        "old_prob_m1_sq": old_m1.dot(old_m1),
        "rollout_prob_m1": rollout_m1.sum(),
        "rollout_prob_m1_sq": rollout_m1.dot(rollout_m1),
        "prob_diff": gap.sum(),
        "prob_diff_sq": gap.dot(gap),
        "prob_diff_max": _max(gap),
    }


def _weight_sums(weights: Tensor, raw: Tensor, upper: float | None) -> dict[str, Tensor]:
    """Moments of the applied weights [N]; `bounded` ones are clamped to [1/upper, upper], as ms-swift does for ESS."""
    bounded = weights if upper is None else weights.clamp(1 / upper, upper)
    weight_m1 = weights - 1
    return {
        "raw_m1": (raw - 1).sum(),
        "weight_m1": weight_m1.sum(),
        "weight_m1_sq": weight_m1.dot(weight_m1),
        "weight_max": _max(weights),
        "minus_weight_min": _max(-weights),
        "bounded_weight": bounded.sum(),
        "bounded_weight_sq": bounded.dot(bounded),
    }


def _correction_sums(
    rows: Rows,
    old: Tensor,
    rollout: Tensor,
    counted: Tensor,
    where: Tensor,
    config: CorrectionConfig,
    token_ratio: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Applied weights [N], ratios before control [N], and what the correction clipped and dropped.

    The weights are those before `batch_normalize`: it divides by a mean over the optimiser step, which these rows
    alone do not know, and afterwards the mean weight is 1 whatever happened.
    """
    found = correct(old, rollout, rows.mask, dataclasses.replace(config, batch_normalize=False))
    valid_rows = rows.mask.any(1)
    changed = {
        "corrected_tokens": rows.mask.sum(),
        "corrected_rows": valid_rows.sum(),
        "lost_tokens": (rows.mask & ~found.measured_mask).sum(),
        "lost_rows": (valid_rows & ~found.measured_mask.any(1)).sum(),
    }
    if config.veto_low is not None or config.veto_high is not None:
        changed |= {"veto_units": valid_rows.sum(), "vetoed_rows": (found.vetoed & valid_rows).sum()}
    if config.level == "none":
        return token_ratio, token_ratio, changed
    high, low, units = found.clipped_high & counted, found.clipped_low & counted, counted
    by_token = (config.bound_level or config.level) == "token"
    if not by_token:
        high, low, units = high.any(1), low.any(1), counted.any(1)
    clipped = high | low if by_token and config.control == "mask" else high
    changed |= {"bounded_units": units.sum(), "clipped": clipped.sum()}
    if config.upper is not None:
        changed |= {"high_units": units.sum(), "clipped_high": high.sum()}
    if config.lower is not None:
        changed |= {"low_units": units.sum(), "clipped_low": low.sum()}
    return found.measured_weights.flatten()[where], found.raw_ratio.flatten()[where], changed


def _row_sums(tokens: dict[str, Tensor], weights: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Row statistics from packed tokens [N] and tokens per row [B]; a row without a counted token is left out."""
    filled = lengths > 0
    old, rollout, total, weight = (
        torch.segment_reduce(packed, "sum", lengths=lengths)[filled]
        for packed in (tokens["old"], tokens["rollout"], tokens["difference"], weights)
    )
    lengths = lengths[filled]
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
        "log_ppl_diff_max": _max(-log_ratio),
        "minus_log_ppl_diff_min": _max(log_ratio),
        "ppl_ratio": torch.exp(-log_ratio).sum(),
        "chi2_geometric": torch.expm1(2 * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).sum(),
        "chi2_product": torch.expm1(2 * total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).sum(),
        "row_weight": row_weight.sum(),
        "row_weight_sq": row_weight.dot(row_weight),
    }


def _optional_sums(rows: Rows, difference: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Sums of whatever [B] tensors were given, over the non-empty rows."""
    values: dict[str, Tensor] = {}
    valid = rows.mask.any(1)
    if rows.policy_lag is not None:
        values |= {"lag_units": valid.sum(), "lag": rows.policy_lag[valid].double().sum()}
    if rows.off_policy_keep is not None:
        dropped = valid & ~rows.off_policy_keep
        values |= {"off_policy_units": valid.sum(), "off_policy_rows": dropped.sum()}
        if rows.advantages is not None:
            negative = valid & (rows.advantages < 0)
            values |= {"negative_units": negative.sum(), "negative_off_policy_rows": (dropped & negative).sum()}
    if rows.rewards is not None:
        rewarded = (lengths > 0) & rows.rewards.isfinite()
        reward = rows.rewards[rewarded].double()
        row_l = (torch.segment_reduce(difference, "sum", lengths=lengths) / lengths)[rewarded]
        values |= {
            "reward_units": rewarded.sum(),
            "reward": reward.sum(),
            "reward_sq": reward.dot(reward),
            "row_l": row_l.sum(),
            "row_l_sq": row_l.dot(row_l),
            "row_l_reward": row_l.dot(reward),
        }
    return values


def _max(values: Tensor) -> Tensor:
    """Largest of [N], -inf of none (`amax` refuses an empty tensor)."""
    return values.amax() if values.numel() else values.new_tensor(-torch.inf)
