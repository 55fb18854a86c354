"""What each correction leaves of the true policy gradient: exact bias and variance, by enumeration, as Markdown.

python -m tests.benchmarks.bias_table

Every row of the table is a choice of importance weights and masks; every number is the median over random pairs of
the policies of `tests.maths.closed_form`, where all completions (of 1 to 3 tokens) are summed and none is sampled.
Read it by comparing rows: a real model's figures differ, and long rows differ most. There a product of ratios varies
far more, and a geometric mean far less (it tends to exp(-KL)), so that bounds as tight as [0.999, 1.001] can keep
rows that they drop here.
`verl/bypass` is left out: it has no weight, its loss divides by the rollout policy itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import fields

from torch import Tensor

from app.maths.correction import PRESETS, CorrectionConfig, correct
from app.maths.offpolicy import sequence_keep
from tests.maths.closed_form import GradientQuality, Pair, gradient_quality, kl_rollout_train, make_pair, per_token

MISMATCHES = {"small": 0.05, "larger": 0.5}
"""Standard deviation of the noise on the rollout's logits."""
UNBOUNDED = 1e6
"""An upper bound that no ratio of these policies reaches."""
OFF_POLICY_DELTA = 0.1
"""Threshold of the off-policy sequence mask, nats per token."""

Weights = Callable[[Pair], Tensor]


def corrected(config: CorrectionConfig) -> Weights:
    """[S, T] the weights of a correction, 0 where its mask drops a token."""

    def weights(pair: Pair) -> Tensor:
        found = correct(pair.train, pair.rollout, pair.mask, config)
        return found.is_weights * found.mask

    return weights


def off_policy_masked(weights: Weights) -> Weights:
    """The same weights, 0 in the rows that the off-policy sequence mask drops at the first update."""

    def masked(pair: Pair) -> Tensor:
        keep = sequence_keep(pair.train, pair.rollout, pair.mask, pair.advantages, OFF_POLICY_DELTA)
        return weights(pair) * keep[:, None]

    return masked


NO_CORRECTION = corrected(CorrectionConfig())
TOKEN, SEQUENCE, GEOMETRIC = (
    corrected(CorrectionConfig(level=level, upper=UNBOUNDED)) for level in ("token", "sequence", "geometric")
)
CORRECTIONS: dict[str, Weights] = {
    "no correction": NO_CORRECTION,
    "token, unbounded": TOKEN,
    "geometric, unbounded": GEOMETRIC,
    "sequence, unbounded": SEQUENCE,
    **{name: corrected(config) for name, config in PRESETS.items() if not config.bypass},
    f"off-policy mask at {OFF_POLICY_DELTA}": off_policy_masked(NO_CORRECTION),
    f"off-policy mask at {OFF_POLICY_DELTA}, sequence, unbounded": off_policy_masked(SEQUENCE),
}
"""Row of the table -> its weights. `unbounded` are the levels before any control."""


def median_quality(pairs: Iterable[Pair], weights: Weights) -> GradientQuality:
    """The median of each figure over the pairs; a NaN counts only if most pairs have one."""
    found = [gradient_quality(pair, weights(pair)) for pair in pairs]
    medians = {}
    for field in fields(GradientQuality):
        values = [value for quality in found if not math.isnan(value := getattr(quality, field.name))]
        medians[field.name] = statistics.median(values) if 2 * len(values) > len(found) else math.nan
    return GradientQuality(**medians)


def bias_table(pairs: int = 100) -> dict[str, dict[str, GradientQuality]]:
    """Mismatch -> correction -> medians over `pairs` random pairs."""
    table = {}
    for label, mismatch in MISMATCHES.items():
        drawn = [make_pair(seed, mismatch) for seed in range(pairs)]
        table[label] = {name: median_quality(drawn, weights) for name, weights in CORRECTIONS.items()}
    return table


def markdown(table: dict[str, dict[str, GradientQuality]]) -> str:
    """Return the table; bias, cosine, variance and rows used, once for each mismatch."""
    columns = ("bias", "cosine", "variance", "rows used")
    heads = [f"{column}, {label}" for label in table for column in columns]
    lines = ["| correction | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
    for name in CORRECTIONS:
        cells = [_cells(qualities[name]) for qualities in table.values()]
        lines.append(f"| {name} | " + " | ".join(cell for group in cells for cell in group) + " |")
    return "\n".join(lines)


def _cells(quality: GradientQuality) -> list[str]:
    share = f"{quality.rows_used:.0%}"
    cosine = "–" if share == "0%" else f"{quality.cosine:.3f}"  # no direction to speak of
    return [f"{quality.relative_bias:.3f}", cosine, f"{quality.relative_variance:.2f}", share]


def main(pairs: int = 100) -> None:
    """Print the table and how large the mismatches are."""
    for label, mismatch in MISMATCHES.items():
        divergence = statistics.median(per_token(make_pair(i, mismatch), kl_rollout_train) for i in range(pairs))
        print(f"{label} mismatch: KL(rollout ‖ train) {divergence:.1e} nats per token (median of {pairs} pairs)")
    print()
    print(markdown(bias_table(pairs)))


if __name__ == "__main__":
    main()
