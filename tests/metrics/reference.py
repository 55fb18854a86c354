"""The definitions of the diagnostics as plain loops over Python floats, written without the code under test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from app.maths.correction import CorrectionConfig

KEY = "rollout_correction/"


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def kish(weights: Sequence[float]) -> float:
    average = mean(weights)
    return 1 / mean([(w / average) ** 2 for w in weights]) if average else 0.0


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """Smallest value with at least `percent` of the values at or below it."""
    return sorted(values)[max(1, -(-percent * len(values) // 100)) - 1]


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    mx, my = mean(x), mean(y)
    cov = mean([(a - mx) * (b - my) for a, b in zip(x, y, strict=True)])
    return cov / (statistics.pstdev(x) * statistics.pstdev(y))


def read_rows(old: Tensor, rollout: Tensor, mask: Tensor) -> list[list[tuple[float, float]]]:
    """Non-empty rows of (old, rollout) pairs."""
    rows = [
        [(old[i, t].item(), rollout[i, t].item()) for t in range(mask.shape[1]) if mask[i, t]]
        for i in range(mask.shape[0])
    ]
    return [row for row in rows if row]


def row_ratios(row: list[tuple[float, float]], level: str) -> list[float]:
    logs = [a - b for a, b in row]
    if level == "token":
        return [math.exp(clamp(x, -20, 20)) for x in logs]
    total = math.fsum(logs) if level == "sequence" else mean(logs)
    return [math.exp(clamp(total, -20, 20))] * len(row)


def row_weights(row: list[tuple[float, float]], config: CorrectionConfig) -> tuple[list[float], list[float]]:
    """Applied weights, and the ratios that the bounds are tested on, of one row."""
    raw = row_ratios(row, config.level)
    tested = row_ratios(row, config.bound_level or config.level)
    low, high = config.lower or 0.0, config.upper or math.inf
    if config.control == "truncate":
        return [clamp(r, low, high) for r in raw], tested
    return [r if low <= t <= high else 0.0 for r, t in zip(raw, tested, strict=True)], tested


def expected(old: Tensor, rollout: Tensor, mask: Tensor, config: CorrectionConfig | None) -> dict[str, float]:
    """Every diagnostic that needs no optional input and no rejection, percentiles exact. All tokens finite."""
    rows = read_rows(old, rollout, mask)
    pairs = [pair for row in rows for pair in row]
    logs = [a - b for a, b in pairs]
    clamped = [clamp(x, -20, 20) for x in logs]
    ratios = [math.exp(x) for x in clamped]
    gaps = [abs(math.exp(a) - math.exp(b)) for a, b in pairs]
    old_means = [mean([a for a, _ in row]) for row in rows]
    rollout_means = [mean([b for _, b in row]) for row in rows]
    d = [b - a for a, b in zip(old_means, rollout_means, strict=True)]
    sums = [math.fsum(a - b for a, b in row) for row in rows]
    by_row = [row_ratios(row, "token") for row in rows]
    raw, upper, clipping = ratios, None, {}
    if config is not None and config.level != "none":
        by_row = [row_weights(row, config)[0] for row in rows]
        raw = [r for row in rows for r in row_ratios(row, config.level)]
        upper, clipping = config.upper, clipped(rows, config)
    weights = [w for row in by_row for w in row]
    bounded = [w if upper is None else clamp(w, 1 / upper, upper) for w in weights]
    found = {
        "kl": mean([-x for x in logs]),
        "k3_kl": mean([min(10.0, math.expm1(x) - x) for x in clamped]),
        "chi2_token": mean([math.expm1(2 * x) for x in clamped]),
        "chi2_seq": mean([math.expm1(-2 * clamp(x, -20, 20)) for x in d]),
        "chi2_seq_product": mean([math.expm1(2 * clamp(x, -20, 20)) for x in sums]),
        "training_ppl": mean([math.exp(-x) for x in old_means]),
        "training_log_ppl": mean([-x for x in old_means]),
        "rollout_ppl": mean([math.exp(-x) for x in rollout_means]),
        "rollout_log_ppl": mean([-x for x in rollout_means]),
        "log_ppl_diff": mean(d),
        "log_ppl_abs_diff": mean([abs(x) for x in d]),
        "log_ppl_diff_max": max(d),
        "log_ppl_diff_min": min(d),
        "ppl_ratio": mean([math.exp(x) for x in d]),
        "ess": kish(bounded),
        "ess_exact": kish(weights),
        "ess_sequence": kish([mean(row) for row in by_row]),
        "is_weight_mean": mean(weights),
        "is_weight_std": statistics.pstdev(weights),
        "is_weight_max": max(weights),
        "is_weight_min": min(weights),
        "raw_ratio_mean": mean(raw),
        "raw_ratio_std": statistics.pstdev(raw),
        "raw_ratio_max": max(raw),
        **clipping,
        "logprob_abs_diff_mean": mean([abs(x) for x in logs]),
        "logprob_abs_diff_max": max(abs(x) for x in logs),
        **{f"logprob_abs_diff_p{p}": nearest_rank([abs(x) for x in clamped], p) for p in (50, 95, 99)},
        **{f"ratio_p{p}": nearest_rank(ratios, p) for p in (25, 50, 75, 95, 99)},
        "prob_diff_mean": mean(gaps),
        "prob_diff_std": statistics.pstdev(gaps),
        "prob_diff_max": max(gaps),
        "prob_pearson": correlation([math.exp(a) for a, _ in pairs], [math.exp(b) for _, b in pairs]),
        **by_position(rows),
        "missing_logprob_fraction": 0.0,
        "nonfinite_logprob_fraction": 0.0,
    }
    if config is not None:
        found |= {"rejected_token_fraction": 0.0, "rejected_sequence_fraction": 0.0}
    return {KEY + name: value for name, value in found.items()}


def by_position(rows: list[list[tuple[float, float]]]) -> dict[str, float]:
    """Mean |old - rollout| by power-of-two bucket of the position; the valid tokens of each row come first in it."""
    buckets: dict[int, list[float]] = {}
    for row in rows:
        for position, (a, b) in enumerate(row):
            first = 0 if position == 0 else 2 ** int(math.log2(position))
            buckets.setdefault(first, []).append(abs(a - b))
    return {f"abs_diff_at_position/{first:06d}": mean(gaps) for first, gaps in buckets.items()}


def clipped(rows: list[list[tuple[float, float]]], config: CorrectionConfig) -> dict[str, float]:
    """Clipped shares: of tokens where the bound is on tokens, of rows otherwise."""
    by_token = (config.bound_level or config.level) == "token"
    results = [row_weights(row, config) for row in rows]
    tested = [t for _, ratios in results for t in (ratios if by_token else ratios[:1])]
    found = {}
    if config.upper is not None:
        found["clipped_frac_high"] = mean([float(t > config.upper) for t in tested])
    if config.lower is not None:
        found["clipped_frac_low"] = mean([float(t < config.lower) for t in tested])
    if by_token and config.control == "mask":
        return found | {"clipped_frac": mean([float(w == 0) for weights, _ in results for w in weights])}
    return found | {"clipped_frac": found.get("clipped_frac_high", 0.0)}


def make_rows(seed: int, count: int = 7, width: int = 23, noise: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Random log-probabilities [count, width] float64 and a mask with ragged lengths, one row empty."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(count, width, generator=generator, dtype=torch.float64)
    gap = noise * torch.randn(count, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (count, 1), generator=generator)
    lengths[count // 2] = 0
    return old, (old + gap).clamp(max=0), torch.arange(width) < lengths


def assert_close(found: dict[str, float], wanted: dict[str, float], rel: float = 1e-9) -> None:
    """Same keys, values within `rel`; percentiles within 1 %."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        tolerance = 0.01 if "_p" in key and key.rsplit("_p", 1)[1].isdigit() else rel
        assert math.isclose(found[key], value, rel_tol=tolerance, abs_tol=1e-12), (key, found[key], value)


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    """Same keys, values within 1e-12: what only the order of summation may change."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert math.isclose(found[key], value, rel_tol=1e-12, abs_tol=1e-12), (key, found[key], value)
