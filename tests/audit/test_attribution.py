from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.audit.attribution.attribution import causes, floor, healthy_k3, rank, share, summary, verdict
from app.audit.attribution.distance import distance
from app.audit.types import Check, Comparison, Distance, FactorResult, NoiseSource, Round


def far(rms: float, mean_abs: float | None = None, **fields: Any) -> Distance:
    mean_abs = rms if mean_abs is None else mean_abs
    return Distance(**(dict(mean_abs=mean_abs, max_abs=3 * rms, rms=rms, k3=rms**2 / 2, tokens=100) | fields))


def factor(key: str, share: float = 0.0, **fields: Any) -> FactorResult:
    shown = dict(key=key, title=f"the {key}", side="engine", change="a -> b", left=far(0.1), share=share, remedy="")
    return FactorResult(**(shown | fields))


def test_share_by_hand() -> None:
    assert share(far(0.5), far(0.4), far(0.0)) == pytest.approx((0.25 - 0.16) / 0.25)
    assert share(far(0.5), far(0.4), far(0.3)) == pytest.approx((0.25 - 0.16) / (0.25 - 0.09))
    assert share(far(0.5), far(0.5), far(0.1)) == 0.0


def test_a_change_down_to_the_floor_or_below_it_explains_all() -> None:
    assert share(far(0.5), far(0.1), far(0.1)) == 1.0
    assert share(far(0.5), far(0.01), far(0.1)) == 1.0


def test_a_change_for_the_worse_has_a_share_below_0() -> None:
    assert share(far(0.5), far(1.0), far(0.0)) == -3.0


def test_nothing_is_explained_where_nothing_stands_out_or_nothing_was_compared() -> None:
    assert share(far(0.1), far(0.0), far(0.1)) == 0.0
    assert share(far(0.1), far(0.0), far(0.2)) == 0.0
    assert share(far(0.5), far(0.0, tokens=0), far(0.1)) == 0.0


@given(
    sizes=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4),
    noise=st.floats(0.0, 0.2),
)
def test_shares_of_independent_causes_add_up_to_1(sizes: list[float], noise: float) -> None:
    # columns of a Hadamard matrix: mean 0, and exactly uncorrelated over the tokens
    signs = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    parts = [size * signs[:, column] for column, size in enumerate([*sizes, noise], start=1)]
    engine = torch.full((8,), -2.0, dtype=torch.float64)
    start, least = distance(engine, engine + sum(parts)), distance(engine, engine + parts[-1])
    shares = [share(start, distance(engine, engine + sum(parts) - part), least) for part in parts[:-1]]
    assert sum(shares) == pytest.approx(1)
    total = sum(size**2 for size in sizes)
    assert shares == pytest.approx([size**2 / total for size in sizes])


def test_rank_is_by_share_but_the_smaller_intervention_wins_a_tie_with_the_best() -> None:
    order = ["prefix_cache", "weights", "dtype"]
    results = [factor("dtype", 1.0), factor("weights", 0.96), factor("prefix_cache", 0.94), factor("template", 0.97)]
    assert [result.key for result in rank(results, order)] == ["weights", "dtype", "template", "prefix_cache"]


def test_factors_far_from_the_best_are_ranked_by_share_alone() -> None:
    results = [factor("a", 0.10), factor("b", 0.12), factor("c", 0.9), factor("d", -1.0)]
    assert [result.key for result in rank(results, ["a", "b", "d", "c"])] == ["c", "b", "a", "d"]
    assert rank([], ["a"]) == ()


def test_floor_is_the_largest_of_each_field_among_what_counts() -> None:
    def source(found: Distance, in_floor: bool) -> NoiseSource:
        return NoiseSource(side="trainer", name="x", distance=found, in_floor=in_floor)

    a = Distance(mean_abs=0.2, max_abs=0.3, rms=0.25, k3=1e-3, tokens=90)
    b = Distance(mean_abs=0.1, max_abs=0.9, rms=0.30, k3=5e-4, tokens=100)
    counted = [source(a, True), source(b, True), source(far(9.0), False)]
    assert floor(counted) == Distance(mean_abs=0.2, max_abs=0.9, rms=0.30, k3=1e-3, tokens=100)
    assert floor([source(far(9.0), False)]) == Distance(mean_abs=0.0, max_abs=0.0, rms=0.0, k3=0.0, tokens=0)


@pytest.mark.parametrize(
    ("mean_abs", "rms", "max_abs", "floor_mean", "floor_rms", "expected"),
    [
        # measured on SmolLM2-135M; root mean squares as of a normal distribution, 1.25 times the mean
        (5.9e-6, 7.4e-6, 1e-3, 4e-6, 5e-6, "match"),  # float32 on both sides
        (5.9e-6, 7.4e-6, 1e-3, 0.0, 0.0, "match"),  # the same without any noise
        (1.6e-3, 2.0e-3, 3e-2, 5e-6, 6e-6, "mismatch"),  # one AdamW step of 1e-6 behind
        (4.6e-2, 5.8e-2, 0.46, 4.4e-2, 5.5e-2, "within noise"),  # bfloat16 on both sides
        (0.175, 0.22, 1.6, 4.4e-2, 5.5e-2, "mismatch"),  # the same with the cache in fp8
        # by construction
        (1e-6, 3e-4, 0.02, 1e-6, 1e-6, "mismatch"),  # one token is off, the mean does not show it
        (0.04, 0.30, 4.0, 0.04, 0.05, "mismatch"),  # a tail that the noise does not have
        (0.10, 0.06, 0.46, 0.04, 0.05, "mismatch"),  # a bulk that the noise does not have
    ],
)
def test_verdict(
    mean_abs: float, rms: float, max_abs: float, floor_mean: float, floor_rms: float, expected: str
) -> None:
    found, least = far(rms, mean_abs, max_abs=max_abs), far(floor_rms, floor_mean)
    assert verdict(found, least) == expected


def test_verdict_without_a_token_is_no_match() -> None:
    assert verdict(far(0.0, tokens=0), far(1.0)) == "mismatch"


def test_the_factor_of_the_noise_can_be_set() -> None:
    assert verdict(far(0.19), far(0.1)) == "mismatch"
    assert verdict(far(0.19), far(0.1), factor=2) == "within noise"


def test_healthy_k3_is_that_of_the_design() -> None:
    assert healthy_k3() == 1e-3


def comparison(found: Distance, **metrics: float) -> Comparison:
    return Comparison(
        distance=found,
        metrics={f"rollout_correction/{key}": value for key, value in metrics.items()},
        top1_agreement=None,
        topk_overlap=None,
        topk_drift=None,
        by_position=(),
        by_probability=(),
        worst=(),
        scatter=(),
        histogram=(),
    )


def test_summary_of_a_match() -> None:
    found = far(7e-6, 5.9e-6, k3=2e-11)
    assert summary("match", comparison(found), far(6e-6)) == (
        "Engine and trainer match up to the rounding of float32: mean |difference| 5.9e-06 nats over 100 tokens, "
        "k3 2e-11 (healthy: at most 0.001)."
    )


def test_summary_within_noise_says_when_the_precision_is_the_cost() -> None:
    costly = summary("within noise", comparison(far(0.06, 0.046, k3=2.3e-3)), far(0.055, 0.044))
    assert costly.startswith("No mismatch beyond noise: mean |difference| 0.046 nats")
    assert "one side differs from itself by 0.044; k3 0.0023 (healthy: at most 0.001)" in costly
    assert "precision alone costs that" in costly
    assert "float32" in costly
    cheap = summary("within noise", comparison(far(0.006, 0.0044, k3=2e-5)), far(0.006, 0.004))
    assert "precision" not in cheap


def test_summary_names_the_cause_with_its_share_and_what_to_change() -> None:
    left = far(math.sqrt(0.2**2 - 0.94 * (0.2**2 - 0.05**2)))
    cause = factor("kv", 0.94, title="key-value cache dtype", change="fp8 -> auto", left=left)
    rounds = [Round(taken_away=(), start=far(0.2), factors=(cause, factor("weights", 0.1)))]
    text = summary("mismatch", comparison(far(0.2, 0.17, k3=0.031)), far(0.05, 0.044), rounds)
    assert text == (
        "Engine and trainer differ beyond noise: mean |difference| 0.17 nats over 100 tokens, noise floor 0.044; "
        "k3 0.031 (healthy: at most 0.001). "
        "Likeliest cause: key-value cache dtype (fp8 -> auto) explains 94% of the squared difference beyond noise."
    )


def test_summary_gives_a_second_cause_its_share_of_the_whole() -> None:
    # of 1.0 squared the first change leaves 0.4, the second of these 0.1: 60 % and 30 % of the whole
    first = factor("a", 0.6, left=far(math.sqrt(0.4)))
    second = factor("b", 0.75, left=far(math.sqrt(0.1)))
    rounds = [
        Round(taken_away=(), start=far(1.0), factors=(first,)),
        Round(taken_away=("a",), start=far(math.sqrt(0.4)), factors=(second,)),
    ]
    text = summary("mismatch", comparison(far(1.0)), far(0.0), rounds)
    assert "the a (a -> b) explains 60%" in text
    assert "then the b (a -> b) another 30%" in text


def test_two_causes_that_explain_half_only_together_are_both_named() -> None:
    # of 1.0 squared the first change leaves 0.6, the second 0.36: 40 % of each round, 64 % together
    rounds = [
        Round(taken_away=(), start=far(1.0), factors=(factor("a", 0.4, left=far(math.sqrt(0.6))),)),
        Round(taken_away=("a",), start=far(math.sqrt(0.6)), factors=(factor("b", 0.4, left=far(0.6)),)),
    ]
    assert [cause.key for cause in causes(rounds, far(0.0))] == ["a", "b"]
    text = summary("mismatch", comparison(far(1.0)), far(0.0), rounds)
    assert "Likeliest causes: the a (a -> b) explains 40% of" in text
    assert "then the b (a -> b) another 24%" in text


def test_summary_says_when_nothing_explains_half() -> None:
    left = far(math.sqrt(0.2**2 - 0.23 * (0.2**2 - 0.01**2)))
    rounds = [Round(taken_away=(), start=far(0.2), factors=(factor("weights", 0.23, left=left),))]
    text = summary("mismatch", comparison(far(0.2)), far(0.01), rounds)
    assert "No change explains half of it; the most, 23% of" in text
    assert "Likeliest cause" not in text
    assert "the cause is not known" in summary("mismatch", comparison(far(0.2)), far(0.01), [])


def test_summary_adds_missing_values_and_failed_checks() -> None:
    checks = [Check(name=name, passed=passed, detail="") for name, passed in (("a", True), ("b", False), ("c", None))]
    text = summary("match", comparison(far(1e-6), missing_logprob_fraction=0.125), far(0.0), (), checks)
    assert text.endswith("12.50% of the tokens have no log-probability of the engine. Failed check: b.")
    nothing = summary("mismatch", comparison(far(0.0, tokens=0)), far(0.0))
    assert nothing.startswith("Engine and trainer could not be compared: no token")
