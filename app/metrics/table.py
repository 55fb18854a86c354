"""The table of every `rollout_correction/` metric: what it means, what is healthy, and how it is read.

The collection, the documentation (`markdown`) and the TensorBoard dashboard (`app.dashboard`) are built from it.
`old` and `rollout` below are log-probabilities of the trainer's model and of the engine, l = old - rollout, rho =
exp(l) with l clamped to [-20, 20], A the advantage. Without a correction the weight is rho. `tokens` are the valid
tokens with a finite l, `rows` the rows with at least one of them; `valid` tokens and rows are the mask's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.metrics.formulas import (
    Reader,
    effective_sample_size,
    maximum,
    mean,
    minimum,
    percentile,
    probability_correlation,
    reward_correlation,
    std,
)
from app.metrics.position import position_means
from app.metrics.spec import Direction, Group, KeyInfo, Range, Unit, When
from app.metrics.state import Totals

PREFIX = "rollout_correction/"


@dataclass(frozen=True, kw_only=True)
class Spec(KeyInfo):
    """One metric of this table."""

    read: Reader
    """How it is read from the totals."""


def _specs(
    group: Group, when: When, unit: Unit, direction: Direction, denominator: str, **metrics: tuple
) -> list[Spec]:
    """Specs that share all but key=(definition, reader[, healthy[, tolerable]])."""
    names = ("definition", "read", "healthy", "tolerable")
    shared: dict[str, Any] = dict(group=group, when=when, unit=unit, direction=direction, denominator=denominator)
    return [Spec(key=key, **shared, **dict(zip(names, row, strict=False))) for key, row in metrics.items()]


# fmt: off
SPECS: tuple[Spec, ...] = (
    *_specs("mismatch", "every step", "nats", "to 0", "tokens",
        kl=("mean of rollout - old: k1 of KL(rollout ‖ train)", mean("kl", "tokens"), Range(low=-0.1, high=0.1)),
        k3_kl=("mean of rho - 1 - l, each at most 10: k3 of KL(rollout ‖ train)",
               mean("k3", "tokens"), Range(high=1e-3)),
    ),
    *_specs("mismatch", "every step", "1", "to 0", "tokens",
        chi2_token=("mean of rho² - 1: χ²(train ‖ rollout)", mean("chi2", "tokens"), Range(high=1.0)),
    ),
    *_specs("mismatch", "detailed", "1", "to 0", "rows",
        chi2_seq=("mean of squared geometric row ratio, exp(mean l), - 1", mean("chi2_geometric", "rows")),
        chi2_seq_product=("mean of squared row ratio, exp(sum l), - 1", mean("chi2_product", "rows")),
    ),
    *_specs("mismatch", "every step", "nats", "to 0", "tokens",
        logprob_abs_diff_mean=("mean of |l|, unclamped", mean("abs_diff", "tokens")),
    ),
    *_specs("mismatch", "every step", "nats", "to 0", "-",
        logprob_abs_diff_max=("largest |l|, unclamped", maximum("abs_diff_max")),
    ),
    *_specs("mismatch", "detailed", "nats", "to 0", "tokens",
        logprob_abs_diff_p50=("median of |l| (± 1 %)", percentile(0.50, absolute=True)),
        logprob_abs_diff_p95=("95th percentile of |l| (± 1 %)", percentile(0.95, absolute=True)),
        logprob_abs_diff_p99=("99th percentile of |l| (± 1 %)", percentile(0.99, absolute=True)),
    ),
    *_specs("mismatch", "detailed", "probability", "to 0", "tokens",
        prob_diff_mean=("mean of |exp(old) - exp(rollout)|", mean("prob_diff", "tokens")),
        prob_diff_std=("standard deviation (population) of |exp(old) - exp(rollout)|",
                       std("prob_diff", "prob_diff_sq", "tokens")),
    ),
    *_specs("mismatch", "detailed", "probability", "to 0", "-",
        prob_diff_max=("largest |exp(old) - exp(rollout)|", maximum("prob_diff_max")),
    ),
    *_specs("mismatch", "detailed", "1", "to 1", "tokens",
        prob_pearson=("Pearson correlation of exp(old) with exp(rollout); absent without spread",
                      probability_correlation, Range(low=0.99)),
    ),
    *_specs("mismatch", "detailed", "ratio", "to 1", "tokens",
        ratio_p25=("25th percentile of rho (± 1 %)", percentile(0.25, absolute=False)),
        ratio_p50=("median of rho (± 1 %)", percentile(0.50, absolute=False)),
        ratio_p75=("75th percentile of rho (± 1 %)", percentile(0.75, absolute=False)),
        ratio_p95=("95th percentile of rho (± 1 %)", percentile(0.95, absolute=False)),
        ratio_p99=("99th percentile of rho (± 1 %)", percentile(0.99, absolute=False)),
    ),
    *_specs("mismatch", "detailed", "perplexity", "level", "rows",
        training_ppl=("mean over rows of exp(-mean old)", mean("old_ppl", "rows")),
        rollout_ppl=("mean over rows of exp(-mean rollout)", mean("rollout_ppl", "rows")),
    ),
    *_specs("mismatch", "detailed", "nats", "level", "rows",
        training_log_ppl=("mean over rows of -mean old", mean("old_log_ppl", "rows")),
        rollout_log_ppl=("mean over rows of -mean rollout", mean("rollout_log_ppl", "rows")),
    ),
    *_specs("mismatch", "detailed", "nats", "to 0", "rows",
        log_ppl_diff=("mean over rows of d = mean rollout - mean old", mean("log_ppl_diff", "rows")),
        log_ppl_abs_diff=("mean over rows of |d|, d = mean rollout - mean old", mean("log_ppl_abs_diff", "rows")),
    ),
    *_specs("mismatch", "detailed", "nats", "to 0", "-",
        log_ppl_diff_max=("largest d of a row, d = mean rollout - mean old", maximum("log_ppl_diff_max")),
        log_ppl_diff_min=("smallest d of a row, d = mean rollout - mean old", minimum("minus_log_ppl_diff_min")),
    ),
    *_specs("mismatch", "detailed", "ratio", "to 1", "rows",
        ppl_ratio=("mean over rows of exp(d), d = mean rollout - mean old: training over rollout perplexity",
                   mean("ppl_ratio", "rows")),
    ),
    *_specs("mismatch", "detailed", "1", "to 0", "rows with a reward",
        ratio_reward_corr=("Pearson correlation of a row's mean l with its reward; absent without spread",
                           reward_correlation),
    ),
    *_specs("mismatch", "every step", "fraction", "to 0", "valid tokens",
        missing_logprob_fraction=("without a rollout log-probability",
                                  mean("missing", "valid_tokens"), Range(high=0.0)),
        nonfinite_logprob_fraction=("left out: old is not finite, or rollout is infinite",
                                    mean("nonfinite", "valid_tokens"), Range(high=0.0), Range(high=0.0)),
    ),
    *_specs("mismatch", "every step", "versions", "to 0", "valid rows",
        policy_lag=("mean number of weight versions from sampling to training", mean("lag", "lag_units")),
    ),
    *_specs("correction", "every step", "fraction", "to 1", "tokens",
        ess=("effective sample size 1 / mean((v / mean v)²), v the weight clamped to [1/upper, upper] (as ms-swift)",
             effective_sample_size("bounded_weight", "bounded_weight_sq", "tokens"), Range(low=0.9), Range(low=0.3)),
        ess_exact=("effective sample size of the weights w as applied, 1 / mean((w / mean w)²): masked zeros count",
                   effective_sample_size("weight_m1", "weight_m1_sq", "tokens", shift=1),
                   Range(low=0.9), Range(low=0.3)),
    ),
    *_specs("correction", "detailed", "fraction", "to 1", "rows",
        ess_sequence=("effective sample size over rows, a row's weight the mean of its tokens' weights",
                      effective_sample_size("row_weight", "row_weight_sq", "rows"), Range(low=0.9), Range(low=0.3)),
    ),
    *_specs("correction", "every step", "ratio", "to 1", "tokens",
        raw_ratio_mean=("mean ratio before control", mean("raw_m1", "tokens", plus=1)),
        is_weight_mean=("mean weight, before batch normalisation", mean("weight_m1", "tokens", plus=1)),
    ),
    *_specs("correction", "every step", "ratio", "to 0", "tokens",
        raw_ratio_std=("standard deviation (population) of the ratio before control",
                       std("raw_m1", "raw_m1_sq", "tokens")),
        is_weight_std=("standard deviation (population) of the weight", std("weight_m1", "weight_m1_sq", "tokens")),
    ),
    *_specs("correction", "every step", "ratio", "to 1", "-",
        raw_ratio_max=("largest ratio before control", maximum("raw_max")),
        is_weight_max=("largest weight", maximum("weight_max")),
        is_weight_min=("smallest weight", minimum("minus_weight_min")),
    ),
    *_specs("correction", "every step", "fraction", "to 0", "tokens, or rows if the bound is a row's",
        clipped_frac=("ratio above upper; with a token mask: weight 0", mean("clipped", "bounded_units")),
        clipped_frac_high=("ratio above upper", mean("clipped_high", "high_units")),
        clipped_frac_low=("ratio below lower", mean("clipped_low", "low_units")),
    ),
    *_specs("dropped data", "every step", "fraction", "to 0", "valid tokens",
        rejected_token_fraction=("lost to rejection rules and veto", mean("lost_tokens", "corrected_tokens")),
    ),
    *_specs("dropped data", "every step", "fraction", "to 0", "valid rows",
        rejected_sequence_fraction=("lost whole to rejection rules and veto", mean("lost_rows", "corrected_rows")),
        veto_fraction=("dropped by the veto", mean("vetoed_rows", "veto_units")),
        off_policy_sequence_fraction=("dropped by the off-policy mask", mean("off_policy_rows", "off_policy_units")),
    ),
    *_specs("dropped data", "every step", "fraction", "to 0", "valid rows with A < 0",
        off_policy_sequence_fraction_negative=("dropped by the off-policy mask, among the rows that it may drop",
                                               mean("negative_off_policy_rows", "negative_units")),
    ),
)
# fmt: on
"""Every metric, in the order of the documentation."""


DOCUMENTED: tuple[KeyInfo, ...] = (
    *SPECS,
    KeyInfo(
        key="abs_diff_at_position/<first>",
        definition="mean of |l|, unclamped, over the sampled tokens first to 2 first - 1 of a row, from 0",
        unit="nats",
        direction="to 0",
        denominator="tokens there",
        group="mismatch",
        when="detailed",
    ),
)
"""Every metric, the family of those by position included."""


def core_values(totals: Totals) -> dict[str, float]:
    """Read every core metric that has data from CORE totals; keys without the prefix."""
    return _values(totals, "every step")


def detailed_values(totals: Totals) -> dict[str, float]:
    """Read every detailed metric that has data from DETAIL totals; keys without the prefix."""
    return _values(totals, "detailed") | position_means(totals)


def _values(totals: Totals, when: When) -> dict[str, float]:
    found = ((spec.key, spec.read(totals)) for spec in SPECS if spec.when == when)
    return {key: value for key, value in found if value is not None}


def markdown(infos: Iterable[KeyInfo] = DOCUMENTED) -> str:
    """Return the documentation: one Markdown table row per key."""
    names = ("key", "definition", "unit", "better", "mean over", "healthy", "alarm", "when")
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for info in infos:
        healthy = "" if info.healthy is None else str(info.healthy)
        alarm = "" if info.tolerable is None else info.tolerable.outside()
        measured = (info.unit, info.direction, info.denominator, healthy, alarm, info.when)
        cells = (f"`{info.key}`", info.definition, *measured)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
