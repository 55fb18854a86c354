"""From distances to a verdict and a cause: what is noise, which factor explains the rest, and the summary of both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from app.audit.types import Check, Comparison, Distance, FactorResult, NoiseSource, Round, Verdict
from app.metrics import table

MATCH_MEAN_ABS = 5e-5
"""Largest mean |l| in nats that counts as float32 rounding.

SmolLM2-135M in float32 on both sides measured 4e-6 to 6e-6. The smallest real difference measured there, weights that
are one AdamW step of 1e-6 behind, gave 1.6e-3. The bound is about the geometric mean of the two, 1e-4, less a factor
of 2 for the sake of smaller faults.
"""
MATCH_MAX_ABS = 5e-3
"""Largest |l| of a token that counts as float32 rounding: measured were 6e-5 to 1e-3, and 3e-2 for the stale weights.
It finds faults that hit few tokens and vanish in the mean, such as a stale block of the prefix cache."""
NOISE_FACTOR = 1.5
"""How many times the noise floor is still noise.

Errors e of the engine and t of the trainer against exact arithmetic, independent and of mean squares E and T, give a
mismatch of mean square E + T. One side against itself, with a share c of its rounding in common, gives 2 (1 - c) E, or
T. So a floor that redraws all rounding of the noisier side (c = 0) is never below the mismatch, and one that redraws
half of it is below by a factor of at most √2. Measured (SmolLM2-135M, mean |l|): bfloat16 on both sides 0.044 to 0.046
at a floor of 0.044, a ratio of 1.0; with a key-value cache in fp8 0.17, a ratio of 4.
"""
TIE = 0.05
"""Shares that differ by less than this do not distinguish two factors: what is left is noise in both cases."""
EXPLAINS = 0.5
"""Least share that the causes must explain together; below it none is named."""
FEW_TOKENS = 100
"""Number of tokens below which a noise floor and shares are uncertain."""
LEAST_SHARE = 0.1
"""Least share for which a factor is removed; below it what is left has no single cause."""


def floor(noise: Sequence[NoiseSource]) -> Distance:
    """Return the noise floor: field by field the largest among the sources that count; all 0 without one."""
    counted = [source.distance for source in noise if source.in_floor]
    return Distance(
        mean_abs=max((found.mean_abs for found in counted), default=0.0),
        max_abs=max((found.max_abs for found in counted), default=0.0),
        rms=max((found.rms for found in counted), default=0.0),
        k3=max((found.k3 for found in counted), default=0.0),
        tokens=max((found.tokens for found in counted), default=0),
    )


def verdict(distance: Distance, floor: Distance, *, factor: float = NOISE_FACTOR) -> Verdict:
    """Judge a distance between engine and trainer.

    match: float32 rounding (MATCH_MEAN_ABS and MATCH_MAX_ABS), whatever the floor. within noise: at most `factor` times
    the floor in both mean |l| and root mean square, so in the bulk and in the tail; the largest |l| is too uncertain to
    judge by. mismatch: anything else, also where no token could be compared.
    """
    if not distance.tokens:
        return "mismatch"
    if distance.mean_abs <= MATCH_MEAN_ABS and distance.max_abs <= MATCH_MAX_ABS:
        return "match"
    if distance.mean_abs <= factor * floor.mean_abs and distance.rms <= factor * floor.rms:
        return "within noise"
    return "mismatch"


def share(start: Distance, left: Distance, floor: Distance) -> float:
    """Return the share of the mean squared difference beyond the noise floor that a change removed.

    (start.rms² - left.rms²) / (start.rms² - floor.rms²), at most 1: below the floor a difference means nothing.
    Negative: the change made it worse. 0 if the start is within the floor, or if fewer tokens could be compared after
    the change, because some then have probability 0.

    Why squares: let l = sum over causes d_j + noise n, per token, independent and of mean 0. The cross terms vanish in
    the mean, so mean l² = sum mean d_j² + mean n², and without cause j it is less by mean d_j². The share of j is then
    mean d_j² / sum mean d_i², and the shares of all causes add up to 1. Mean |l| does not add up like this: of two
    causes of equal size each would seem to explain 1 - 1/√2 = 29 %. Causes that push the same tokens the same way have
    positive cross terms and shares that add up to more than 1; where they cancel, to less.
    """
    excess = start.rms**2 - floor.rms**2
    if excess <= 0 or left.tokens < start.tokens:
        return 0.0
    return min(1.0, (start.rms**2 - left.rms**2) / excess)


def rank(results: Sequence[FactorResult], order: Sequence[str]) -> tuple[FactorResult, ...]:
    """Rank factors, the likeliest cause first: by share, but those within TIE of the best by their place in `order`.

    Args:
        results: the results of one round.
        order: keys, the smallest intervention first. A larger one contains smaller ones: a new engine also has an
            empty prefix cache and fresh weights, and explains whatever these explain. Unlisted keys come last.
    """
    if not results:
        return ()
    place = {key: number for number, key in enumerate(order)}
    best = max(result.share for result in results)

    def rank_of(result: FactorResult) -> tuple[float, int]:
        tied = result.share >= best - TIE
        return (-best if tied else -result.share, place.get(result.key, len(place)))

    return tuple(sorted(results, key=rank_of))


def causes(rounds: Sequence[Round], floor: Distance) -> tuple[FactorResult, ...]:
    """Return the causes: the factors removed before the last round, then that round's best.

    A factor that explains less than LEAST_SHARE of its round's start is no cause, and there is none at all where the
    factors together explain less than EXPLAINS.

    Args:
        rounds: rounds of the attribution, ranked.
        floor: the noise floor.
    """
    found: list[FactorResult] = []
    for now, then in itertools.zip_longest(rounds, rounds[1:]):
        if then is None:
            found += [factor for factor in now.factors[:1] if factor.share >= LEAST_SHARE]
        else:
            taken = set(then.taken_away) - set(now.taken_away)
            found += [factor for factor in now.factors if factor.key in taken]
    together = share(rounds[0].start, found[-1].left, floor) if found else 0.0
    return tuple(found) if together >= EXPLAINS else ()


def shares_of_whole(found: Sequence[FactorResult], rounds: Sequence[Round], floor: Distance) -> tuple[float, ...]:
    """Return the share of the whole mismatch that each cause removes after those before it are removed.

    Args:
        found: the causes, from `causes`.
        rounds: rounds of the attribution, ranked.
        floor: the noise floor.
    """
    removed = [0.0, *(share(rounds[0].start, factor.left, floor) for factor in found)]
    return tuple(after - before for before, after in itertools.pairwise(removed))


def summary(
    verdict: Verdict,
    comparison: Comparison,
    floor: Distance,
    rounds: Sequence[Round] = (),
    checks: Sequence[Check] = (),
) -> str:
    """Return the findings of an audit in one or two sentences, and one more for missing values and failed checks.

    Args:
        verdict: from `verdict`.
        comparison: engine and trainer as configured.
        floor: the noise floor.
        rounds: rounds of the attribution, ranked.
        checks: all checks; those that failed are named.
    """
    found = comparison.distance
    size = f"mean |difference| {found.mean_abs:.2g} nats over {found.tokens} tokens"
    k3 = f"k3 {found.k3:.2g} (healthy: at most {healthy_k3():g})"
    if not found.tokens:
        sentences = ["Engine and trainer could not be compared: no token has a log-probability on both sides."]
    elif verdict == "match":
        sentences = [f"Engine and trainer match up to the rounding of float32: {size}, {k3}."]
    elif verdict == "within noise":
        sentences = [
            f"No mismatch beyond noise: {size}, where one side differs from itself by {floor.mean_abs:.2g}; {k3}."
        ]
        if found.k3 > healthy_k3():
            sentences.append(
                "The precision alone costs that much: float32 on both sides, or at least on the side with more noise, "
                "would lower it; otherwise keep a correction switched on."
            )
    else:
        size_and_floor = f"{size}, noise floor {floor.mean_abs:.2g}"
        sentences = [f"Engine and trainer differ beyond noise: {size_and_floor}; {k3}.", _cause(rounds, floor)]
        if found.k3 <= healthy_k3():
            sentences.insert(1, "Training copes with a k3 of this size, but something differs that need not.")
    if 0 < found.tokens < FEW_TOKENS:
        sentences.append(f"So few tokens ({found.tokens}) are a hint, no proof: raise --rows.")
    return " ".join([*sentences, *_besides(comparison, checks)])


def healthy_k3() -> float:
    """Return the largest healthy k3, from `app.metrics.table`."""
    (bound,) = (spec.healthy.high for spec in table.SPECS if spec.key == "k3_kl" and spec.healthy is not None)
    assert bound is not None
    return bound


def _cause(rounds: Sequence[Round], floor: Distance) -> str:
    """The causes by name, each with its change and its share of the mismatch."""
    if not any(found.factors for found in rounds):
        return "Nothing was toggled, so the cause is not known."
    found = causes(rounds, floor)
    if not found:
        most = rounds[0].factors[0]
        return (
            f"No change explains half of it; the most, {most.share:.0%} of the squared difference beyond noise, goes "
            f"with {_named(most)}."
        )
    first, *others = zip(found, shares_of_whole(found, rounds, floor), strict=True)
    parts = [f"{_named(first[0])} explains {first[1]:.0%} of the squared difference beyond noise"]
    parts += [f"then {_named(factor)} another {part:.0%}" for factor, part in others]
    return f"Likeliest cause{'s' * (len(found) > 1)}: {', '.join(parts)}."


def _named(factor: FactorResult) -> str:
    return f"{factor.title} ({factor.change})"


def _besides(comparison: Comparison, checks: Sequence[Check]) -> list[str]:
    """Sentences on what no distance shows: missing values and failed checks."""
    missing = comparison.metrics.get(f"{table.PREFIX}missing_logprob_fraction", 0.0)
    failed = [check.name for check in checks if check.passed is False]
    sentences = []
    if missing:
        sentences.append(f"{missing:.2%} of the tokens have no log-probability of the engine.")
    if failed:
        sentences.append(f"Failed check{'s' * (len(failed) > 1)}: {', '.join(failed)}.")
    return sentences
