from __future__ import annotations

import math

import pytest

from app.audit.gates import gates, parse
from app.audit.types import Comparison, Distance
from app.errors import LockstepError


def comparison(top1_agreement: float | None = None, **metrics: float) -> Comparison:
    return Comparison(
        distance=Distance(mean_abs=0.0, max_abs=0.0, rms=0.0, k3=0.0, tokens=1),
        metrics={f"rollout_correction/{key}": value for key, value in metrics.items()},
        top1_agreement=top1_agreement,
        topk_overlap=None,
        topk_drift=None,
        by_position=(),
        by_probability=(),
        worst=(),
        scatter=(),
        histogram=(),
    )


def test_parse() -> None:
    assert parse("k3_kl=1e-3, logprob_abs_diff_max = 0.5,top1_disagreement=0") == {
        "k3_kl": 1e-3,
        "logprob_abs_diff_max": 0.5,
        "top1_disagreement": 0.0,
    }
    assert parse("abs_diff_at_position/000004=0.1") == {"abs_diff_at_position/000004": 0.1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k3=1e-3", r"^--fail-above k3: there is no such metric; did you mean .*k3_kl"),
        ("logprob_abs_diff=1", r"^--fail-above logprob_abs_diff: .*logprob_abs_diff_max"),
        ("abs_diff_at_position/000005=1", r"no such metric; did you mean .*abs_diff_at_position/00000"),
        ("%=1", r"^--fail-above %: .*did you mean k3_kl or"),
        ("k3_kl", r"^--fail-above k3_kl: the bound must be a number, as in k3_kl=0.001$"),
        ("k3_kl=1e-3x", r"^--fail-above k3_kl=1e-3x: the bound must be a number"),
        ("k3_kl=nan", r"must be a number"),
        ("k3_kl=inf", r"must be a number"),
        ("k3_kl=1,k3_kl=2", r"^--fail-above: k3_kl is given twice"),
        ("", r"^--fail-above: '' has no key; write it as k3_kl=0.001"),
        ("k3_kl=1,", r"^--fail-above: '' has no key"),
        ("=3", r"^--fail-above: '=3' has no key"),
        ("ess=0.9", r"^--fail-above ess: healthy is ≥ 0.9, a larger value is better"),
        ("prob_pearson=0.9", r"^--fail-above prob_pearson: healthy is ≥ 0.99"),
    ],
)
def test_what_cannot_be_a_bound_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(LockstepError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_gates_pass_up_to_the_bound() -> None:
    found = gates({"k3_kl": 1e-3, "logprob_abs_diff_max": 0.5}, comparison(k3_kl=1e-3, logprob_abs_diff_max=0.51))
    assert [(gate.key, gate.bound, gate.value, gate.passed) for gate in found] == [
        ("k3_kl", 1e-3, 1e-3, True),
        ("logprob_abs_diff_max", 0.5, 0.51, False),
    ]


def test_what_was_not_measured_fails() -> None:
    bounds = {"k3_kl": 1.0, "clipped_frac": 1.0, "top1_disagreement": 1.0}
    found = gates(bounds, comparison(k3_kl=math.nan))
    assert [(gate.value, gate.passed) for gate in found] == [(None, False)] * 3


def test_the_size_counts_where_0_is_best() -> None:
    kl, ratio = gates({"kl": 0.1, "ratio_p99": 0.1}, comparison(kl=-0.2, ratio_p99=0.05))
    assert (kl.value, kl.passed) == (0.2, False)
    assert (ratio.value, ratio.passed) == (0.05, True)


def test_top1_disagreement() -> None:
    (gate,) = gates({"top1_disagreement": 0.1}, comparison(top1_agreement=0.75))
    assert (gate.value, gate.passed) == (0.25, False)
