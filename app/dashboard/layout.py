"""The Custom Scalars tab: six sections, each chart of keys that share a unit and a magnitude."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.dashboard.keys import ALL, pattern
from app.metrics.spec import KeyInfo
from app.metrics.table import PREFIX

_INFOS: dict[str, KeyInfo] = {info.key: info for info in ALL}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart."""

    title: str
    """What it shows, and the unit."""
    keys: tuple[str, ...]
    """Full keys. For a band: the value, its lower and its upper bound."""
    band: bool = False
    """Draw one line within a band instead of a line for each key."""

    @property
    def heading(self) -> str:
        """What stands above it: the title, and where the values should be."""
        healthy = {key.rsplit("/", 1)[-1]: str(info.healthy) for key in self.keys if (info := _INFOS[key]).healthy}
        if not healthy:
            return self.title
        if len(healthy) == len(self.keys) and len(set(healthy.values())) == 1:
            return f"{self.title} · healthy {next(iter(healthy.values()))}"
        return f"{self.title} · healthy: " + ", ".join(f"{key} {values}" for key, values in healthy.items())


def _lines(title: str, prefix: str, *names: str) -> Chart:
    return Chart(title=title, keys=tuple(prefix + name for name in names))


def _band(title: str, value: str, lower: str, upper: str) -> Chart:
    return Chart(title=title, keys=(PREFIX + value, PREFIX + lower, PREFIX + upper), band=True)


# fmt: off
CHARTS: tuple[Chart, ...] = (
    _lines("KL(rollout ‖ train) by k3: look here first · nats", PREFIX, "k3_kl"),
    _lines("KL(rollout ‖ train) by k1: unbiased, noisy · nats", PREFIX, "kl"),
    _lines("|old - rollout| of a token · nats", PREFIX,
           *(f"logprob_abs_diff_{name}" for name in ("mean", "p50", "p95", "p99"))),
    _lines("|old - rollout| by position · nats", PREFIX, "abs_diff_at_position/<first>"),
    _lines("largest |old - rollout| · nats", PREFIX, "logprob_abs_diff_max"),
    _lines("χ²(train ‖ rollout): tokens, rows", PREFIX, "chi2_token", "chi2_seq"),
    _lines("χ²(train ‖ rollout): product of a row", PREFIX, "chi2_seq_product"),
    _lines("token ratio: upper tail", PREFIX, "ratio_p95", "ratio_p99"),
    _lines("probability difference of a token", PREFIX, "prob_diff_mean", "prob_diff_std"),
    _lines("largest probability difference", PREFIX, "prob_diff_max"),
    _lines("Pearson correlation of probabilities", PREFIX, "prob_pearson"),
    _lines("perplexity: trainer, engine", PREFIX, "training_ppl", "rollout_ppl"),
    _lines("log-perplexity: trainer, engine · nats", PREFIX, "training_log_ppl", "rollout_log_ppl"),
    _lines("|log-perplexity difference| of a row · nats", PREFIX, "log_ppl_abs_diff"),
    _lines("perplexity ratio: trainer / engine", PREFIX, "ppl_ratio"),
    _lines("correlation of log-ratio and reward", PREFIX, "ratio_reward_corr"),
    _lines("tokens that cannot be compared · fraction", PREFIX,
           "missing_logprob_fraction", "nonfinite_logprob_fraction"),
    _lines("weight versions behind", PREFIX, "policy_lag"),
    _lines("canary after a weight sync · nats", "weight_sync/", "canary_abs_diff_mean"),
    _lines("rules of the guard: 0 calm, 1 counting, 2 fired", "mismatch_guard/", "<rule>"),
    _band("token ratio: quartiles", "ratio_p50", "ratio_p25", "ratio_p75"),
    _band("log-perplexity difference of a row: min, mean, max · nats",
          "log_ppl_diff", "log_ppl_diff_min", "log_ppl_diff_max"),

    _lines("effective sample size · fraction", PREFIX, "ess", "ess_exact", "ess_sequence"),
    _lines("before and after: mean of ratio, of weight", PREFIX, "raw_ratio_mean", "is_weight_mean"),
    _lines("before and after: std of ratio, of weight", PREFIX, "raw_ratio_std", "is_weight_std"),
    _lines("before and after: largest ratio, weight", PREFIX, "raw_ratio_max", "is_weight_max"),
    _lines("clipped by the bounds · fraction", PREFIX, "clipped_frac", "clipped_frac_high", "clipped_frac_low"),
    _lines("steered bounds", "adaptive_threshold/", "upper", "lower"),
    _band("applied weight: min, mean, max", "is_weight_mean", "is_weight_min", "is_weight_max"),

    _lines("tokens that reached the loss · fraction", "policy/", "trained_token_fraction"),
    Chart(title="tokens lost, by cause · fraction",
          keys=(PREFIX + "rejected_token_fraction", "policy/low_entropy_fraction")),
    Chart(title="rows lost, by cause · fraction",
          keys=(*(PREFIX + name for name in ("rejected_sequence_fraction", "veto_fraction",
                                             "off_policy_sequence_fraction")),
                "policy/overlong_filtered_fraction")),
    _lines("off-policy rows among those with A < 0 · fraction", PREFIX, "off_policy_sequence_fraction_negative"),
    _lines("off-policy rows: dropped, spared for their advantage", "off_policy_mask/", "dropped_rows", "spared_rows"),
    _lines("largest drift of a row · nats", "off_policy_mask/", "drift_max"),
    _lines("groups with equal rewards · fraction", "rollout/",
           "frac_reward_zero_std", "resampled_group_fraction"),
    _lines("optimiser steps left out: nothing to train on, not finite · fraction", "policy/",
           "skipped_update_fraction", "non_finite_update_fraction"),

    _lines("loss: policy, KL penalty", "policy/", "loss", "kl_loss"),
    _lines("KL: new from old, from reference · nats", "policy/", "approx_kl", "ref_kl"),
    _lines("entropy · nats", "policy/", "entropy"),
    _lines("clipped by the loss · fraction", "policy/", "clip_fraction_low", "clip_fraction_high"),
    _lines("gradient norm before clipping", "policy/", "grad_norm"),
    _lines("learning rate", "policy/", "learning_rate"),

    _lines("reward: mean, std", "rollout/", "reward_mean", "reward_std"),
    _lines("reward by function: mean", "rollout/reward/", "<name>_mean"),
    _lines("reward by function: std", "rollout/reward/", "<name>_std"),
    _lines("KL penalty in the reward: mean, std", "rollout/", "kl_penalty_mean", "kl_penalty_std"),
    _lines("completion length: mean, std, max · tokens", "rollout/", "length_mean", "length_std", "length_max"),
    _lines("completions cut at max_tokens · fraction", "rollout/", "truncated_fraction"),
    _lines("validation reward: sum, by function", "val/", "reward", "<name>"),
    _lines("validation completion length · tokens", "val/", "completion_length"),
    _lines("validation completions cut at max_tokens · fraction", "val/", "truncated_fraction"),

    _lines("seconds by phase, in a log interval", "time/", "rollout", "scoring", "update", "sync"),
    _lines("tokens per second", "time/", "tokens_per_second"),
    _lines("weight sync: send, verify · seconds", "weight_sync/", "seconds", "verify_seconds"),
    _lines("weight sync: gigabytes per second", "weight_sync/", "gigabytes_per_second"),
    _lines("weight sync: growth of peak memory · megabytes", "weight_sync/", "peak_memory_growth_megabytes"),
)
# fmt: on
"""Every chart, in the order of the tab (it puts bands last); a chart stands in the section of its keys' group."""


def layout() -> dict[str, dict[str, list]]:
    """Return the layout for `SummaryWriter.add_custom_scalars`: section -> heading of a chart -> [kind, tags].

    The tags of lines are regular expressions that TensorBoard matches at the start only, hence the `$`; a band
    takes tags as they are.
    """
    sections: dict[str, dict[str, list]] = {}
    for chart in CHARTS:
        charts = sections.setdefault(_INFOS[chart.keys[0]].group, {})
        charts[chart.heading] = ["Margin", list(chart.keys)] if chart.band else ["Multiline", [_regex(chart.keys)]]
    return sections


def _regex(keys: tuple[str, ...]) -> str:
    """One expression for all keys of a chart: each expression costs TensorBoard a request for every run."""
    families = [key for key in keys if "<" in key]
    # a family would also take the keys that have a chart of their own, such as val/truncated_fraction
    other = [re.escape(info.key) for info in ALL if any(re.fullmatch(pattern(f), info.key) for f in families)]
    apart = [tag for tag in other if tag not in map(re.escape, keys)]
    refused = f"(?!(?:{'|'.join(apart)})$)" if apart else ""
    return f"^{refused}(?:{'|'.join(map(pattern, keys))})$"
