"""The guard's rules on sequences of values written by hand."""

from __future__ import annotations

import math

import pytest

from app.training.guard import Event, Guard, Rule

K3 = "rollout_correction/k3_kl"
RULE = Rule(metric="k3_kl", above=0.1, patience=2, recover=0.05)


def told(guard: Guard, *values: float | None) -> list[list[Event]]:
    return [guard.see({} if value is None else {K3: value}, step) for step, value in enumerate(values, start=1)]


def levels(rule: Rule, *values: float | None) -> list[int]:
    guard = Guard([rule])
    found = []
    for step, value in enumerate(values, start=1):
        guard.see({} if value is None else {rule.key: value}, step)
        found.append(guard.levels[rule.label])
    return found


def test_it_takes_patience_to_fire_and_to_recover() -> None:
    assert levels(RULE, 0.2, 0.01, 0.2, 0.2, 0.07, 0.04, 0.2, 0.04, 0.04, 0.2, 0.2) == [1, 0, 1, 2, 2, 2, 2, 2, 0, 1, 2]


def test_a_value_at_the_threshold_is_within_it_and_nan_beyond() -> None:
    assert levels(RULE, 0.1, 0.1) == [0, 0]
    assert levels(RULE, math.nan, math.nan) == [1, 2]
    assert levels(Rule(metric="ess", below=0.3, patience=1), 0.3, 0.2999) == [0, 2]


def test_steps_without_the_value_count_for_nothing() -> None:
    assert levels(RULE, 0.2, None, None, 0.2) == [1, 1, 1, 2]


def test_the_event_says_since_when() -> None:
    guard = Guard([RULE])
    events = told(guard, 0.0, 0.2, 0.3, 0.4, 0.01, 0.02)
    assert [len(found) for found in events] == [0, 0, 1, 0, 0, 1]
    (fired,), (recovered,) = events[2], events[5]
    assert (fired.fired, fired.value, fired.since, fired.step) == (True, 0.3, 2, 3)
    assert (recovered.fired, recovered.since, recovered.step) == (False, 2, 6)
    assert "k3_kl = 0.3 > 0.1 at step 3, beyond it since step 2" in str(fired)


def test_recovery_is_a_fifth_of_the_threshold_away_unless_given() -> None:
    assert Rule(metric="k3_kl", above=0.1).recovery == pytest.approx(0.08)
    assert Rule(metric="ess", below=0.3).recovery == pytest.approx(0.36)
    assert Rule(metric="kl", above=-0.1).recovery == pytest.approx(-0.12)


def test_the_correction_is_on_from_firing_to_recovery() -> None:
    guard = Guard([Rule(metric="k3_kl", above=0.1, patience=1, actions=["correct"])])
    found = []
    for step, value in enumerate((0.05, 0.2, 0.09, 0.05, 0.2)):
        guard.see({K3: value}, step)
        found.append(guard.corrects)
    assert found == [False, True, True, False, True]
    kept = Guard([Rule(metric="k3_kl", above=0.1, patience=1, actions=["correct"], keep=True)])
    told(kept, 0.2, 0.0)
    assert kept.corrects
    assert kept.levels == {"k3_kl_above_0.1": 0}


def test_the_learning_rate_is_halved_at_each_firing_down_to_the_floor() -> None:
    rule = Rule(metric="k3_kl", above=0.1, patience=1, actions=["lower_learning_rate"], keep=True)
    guard = Guard([rule], learning_rate_factor=0.5, learning_rate_floor=0.2)
    scales = []
    for value in (0.0, 0.2, 0.0, 0.2, 0.0, 0.2):
        guard.see({K3: value}, 1)
        scales.append(guard.learning_rate_scale)
    assert scales == [1.0, 0.5, 0.5, 0.25, 0.25, 0.2]
    undone = Guard([Rule(metric="k3_kl", above=0.1, patience=1, actions=["lower_learning_rate"])])
    told(undone, 0.2, 0.0)
    assert undone.learning_rate_scale == 1.0


def test_it_goes_on_from_its_state() -> None:
    values = [0.2, 0.01, 0.2, 0.2, 0.07, 0.04, 0.2, 0.04, 0.04, 0.2, 0.2]
    for cut in range(len(values)):
        before, after = Guard([RULE]), Guard([RULE])
        told(before, *values[:cut])
        after.load_state_dict(before.state_dict())
        whole = Guard([RULE])
        expected = told(whole, *values)[cut:]
        assert [after.see({K3: value}, step) for step, value in enumerate(values[cut:], start=cut + 1)] == expected


def test_one_that_ended_the_run_has_its_patience_again() -> None:
    rule = Rule(metric="k3_kl", above=0.1, patience=2, actions=["stop"])
    guard, resumed = Guard([rule]), Guard([rule])
    told(guard, 0.2, 0.2)
    resumed.load_state_dict(guard.state_dict())
    assert told(resumed, 0.2) == [[]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": "k3_lk", "above": 1.0}, "did you mean k3_kl"),
        ({"metric": "time/rollout", "above": 1.0}, "not logged with every step"),
        ({"metric": "k3_kl"}, "one threshold"),
        ({"metric": "k3_kl", "above": 1.0, "below": 0.0}, "one threshold"),
        ({"metric": "k3_kl", "above": math.inf}, "not finite"),
        ({"metric": "k3_kl", "above": 1.0, "patience": 0}, "patience=0"),
        ({"metric": "k3_kl", "above": 1.0, "recover": 2.0}, "recover=2"),
        ({"metric": "k3_kl", "above": 1.0, "actions": ["shout"]}, "choose from warn"),
        ({"metric": "k3_kl", "above": 1.0, "actions": []}, "choose from warn"),
        ({"metric": "k3_kl", "above": 1.0, "actions": ["stop", "correct"]}, "make two rules"),
        ({"metric": "k3_kl", "above": 1.0, "keep": True}, "keep does nothing"),
        ({"metric": "ess", "below": 0.5, "actions": ["correct"]}, "keep: true"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Rule(**settings)


def test_rules_need_different_names() -> None:
    with pytest.raises(ValueError, match="two rules are called"):
        Guard([RULE, RULE])
