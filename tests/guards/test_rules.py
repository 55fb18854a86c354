"""Rules on sequences made by hand."""

import math

import pytest
import torch

from app.guards.learning_rate import scale_learning_rate
from app.guards.mismatch_guard import Guard
from app.guards.rules import Rule
from app.training.optimiser import OptimConfig, build_optimiser, build_schedule
from callbacks.mismatch_guard import DEFAULT_RULES

K3 = "rollout_correction/k3_kl"


def levels(guard: Guard, values: list[float | None], key: str = K3) -> str:
    """The level of the only rule after each value; None: the value was not logged."""
    found = []
    for step, value in enumerate(values, start=1):
        guard.judge({} if value is None else {key: value}, step)
        found.append(*guard.levels.values())
    return "".join(map(str, found))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 2.0, 2.0, 2.0, 2.0], "01122"),  # patience 3: fires at the third in a row
        ([2.0, 2.0, 0.9, 2.0, 2.0, 2.0], "110112"),  # one good value and it counts anew
        ([2.0, 2.0, None, 2.0], "1112"),  # a value that is not logged counts neither way
        ([1.0, 1.0, 1.0, 1.0], "0000"),  # at the threshold is not beyond it
        ([math.nan, math.nan, math.inf], "112"),  # nothing that cannot be compared is healthy
        ([2.0, 2.0, 2.0, 0.9, 0.9, 0.9, 0.9], "1122222"),  # below the threshold, but not recovered
        ([2.0, 2.0, 2.0, 0.5, 0.4, 0.3, 0.3], "1122200"),  # three recovered values in a row
        ([2.0, 2.0, 2.0, 0.5, 0.5, 0.6, 0.5, 0.5, 0.5], "112222220"),  # interrupted
        ([2.0, 2.0, 2.0, 0.5, 0.5, 0.5, 2.0, 2.0, 2.0], "112220112"),  # armed again
    ],
)
def test_patience_and_hysteresis(values, expected):
    assert levels(Guard([Rule(metric="k3_kl", above=1.0, patience=3, recover=0.5)]), values) == expected


def test_below():
    guard = Guard([Rule(metric="policy/entropy", below=0.5, patience=1, recover=0.6)])
    assert levels(guard, [0.5, 0.4, 0.55, 0.6, 0.4], "policy/entropy") == "02202"


def test_the_default_recovery_is_20_percent_of_the_threshold_to_the_healthy_side():
    assert Rule(metric="k3_kl", above=0.05).recovery == pytest.approx(0.04)
    assert Rule(metric="ess", below=0.3).recovery == pytest.approx(0.36)
    assert Rule(metric="rollout/reward_mean", below=-1.0).recovery == pytest.approx(-0.8)
    assert Rule(metric="nonfinite_logprob_fraction", above=0.0).recovery == 0.0


def test_events_say_what_since_when():
    guard = Guard([Rule(metric="k3_kl", above=1.0, patience=2)])
    events = [
        event
        for step, value in ((4, 3.0), (6, 2.0), (8, 2.5), (10, 0.1), (12, 0.1))
        for event in guard.judge({K3: value}, step)
    ]
    fired, recovered = events
    assert (fired.fired, fired.since, fired.step, fired.value) == (True, 4, 6, 2.0)
    assert str(fired) == ("mismatch_guard: k3_kl = 2 > 1 at step 6, beyond it since step 4 (2 logged values in a row)")
    assert (recovered.fired, recovered.since, recovered.step, recovered.value) == (False, 4, 12, 0.1)


BAD, GOOD = [2.0, 2.0], [0.0, 0.0]


@pytest.mark.parametrize(
    ("keep", "values", "corrects", "scale"),
    [
        (False, [], False, 1.0),
        (False, BAD, True, 0.5),
        (False, [*BAD, *BAD], True, 0.5),  # it fires once, however long it lasts
        (False, [*BAD, *GOOD], False, 1.0),
        (True, [*BAD, *GOOD], True, 0.5),
        (True, [*BAD, *GOOD, *BAD], True, 0.25),
        (True, [*BAD, *GOOD, *BAD, *GOOD, *BAD], True, 0.2),  # 0.125, but for the floor
    ],
)
def test_what_is_undone_and_what_stays(keep, values, corrects, scale):
    rule = Rule(metric="k3_kl", above=1.0, patience=2, actions=["correct", "lower_learning_rate"], keep=keep)
    guard = Guard([rule], learning_rate_factor=0.5, learning_rate_floor=0.2)
    levels(guard, values)
    assert guard.corrects is corrects
    assert guard.learning_rate_scale == scale


def test_two_rules_add_up_and_each_undoes_its_own_part():
    both = ["correct", "lower_learning_rate"]
    rules = [Rule(metric="k3_kl", above=above, patience=1, actions=both) for above in (1.0, 10.0)]
    guard = Guard(rules)
    scales = []
    for step, value in enumerate((0.0, 5.0, 20.0, 5.0, 0.0), start=1):
        guard.judge({K3: value}, step)
        scales.append((guard.learning_rate_scale, guard.corrects))
    assert scales == [(1.0, False), (0.5, True), (0.25, True), (0.5, True), (1.0, False)]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_guard_that_goes_on_equals_one_that_was_not_interrupted(cut, tmp_path):
    values = [0.0, 2.0, 2.0, 2.0, 0.1, 0.1, 3.0, 0.1, 0.1, 0.1, 2.0, 2.0, 2.0]
    rule = Rule(metric="k3_kl", above=1.0, patience=3, actions=["lower_learning_rate"], keep=True)
    straight, first, second = (Guard([rule]) for _ in range(3))
    expected = [(straight.judge({K3: value}, step), straight.states) for step, value in enumerate(values)][cut:]
    for step, value in enumerate(values[:cut]):
        first.judge({K3: value}, step)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    found = [(second.judge({K3: value}, step), second.states) for step, value in list(enumerate(values))[cut:]]
    assert found == expected


def test_after_a_stop_the_run_that_goes_on_has_its_patience_again():
    rule = Rule(metric="k3_kl", above=1.0, patience=2, actions=["stop"])
    guard, resumed = Guard([rule]), Guard([rule])
    assert levels(guard, BAD) == "12"
    resumed.load_state_dict(guard.state_dict())
    assert levels(resumed, BAD) == "12"


def test_a_checkpoint_of_other_rules_is_taken_as_far_as_they_are_the_same():
    guard = Guard([Rule(metric="k3_kl", above=1.0)])
    guard.load_state_dict(
        {"chi2_token_above_1": Guard([Rule(metric="chi2_token", above=1.0)]).state_dict()["chi2_token_above_1"]}
    )
    assert levels(guard, [2.0]) == "1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": "k3_kll", "above": 1.0}, "did you mean k3_kl?"),
        ({"metric": "time/rollout", "above": 1.0}, "not logged with every step"),  # differs between ranks
        ({"metric": "val/reward", "above": 1.0}, "not logged with every step"),
        ({"metric": "k3_kl"}, "give one threshold"),
        ({"metric": "k3_kl", "above": 1.0, "below": 0.5}, "give one threshold"),
        ({"metric": "k3_kl", "above": math.inf}, "above=inf is not finite"),
        ({"metric": "k3_kl", "above": 1.0, "patience": 0}, "patience=0"),
        ({"metric": "k3_kl", "above": 1.0, "recover": 1.5}, "recover=1.5 is beyond the threshold > 1"),
        ({"metric": "ess", "below": 0.3, "recover": 0.2}, "recover=0.2 is beyond the threshold < 0.3"),
        ({"metric": "k3_kl", "above": 1.0, "actions": []}, "actions"),
        ({"metric": "k3_kl", "above": 1.0, "actions": ["shout"]}, "actions=['shout']"),
        ({"metric": "k3_kl", "above": 1.0, "actions": ["correct", "stop"]}, "correct does nothing to a run that stops"),
        ({"metric": "k3_kl", "above": 1.0, "keep": True}, "keep does nothing"),
        ({"metric": "ess", "below": 0.3, "actions": ["correct"]}, "add keep: true, or watch k3_kl"),
        ({"metric": "policy/trained_token_fraction", "below": 0.3, "actions": ["correct"]}, "add keep: true"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(settings, said):
    with pytest.raises(ValueError, match=f"mismatch_guard.rules, the one of {settings['metric']}") as error:
        Rule(**settings)
    assert said in str(error.value)


def test_every_kind_of_value_can_be_watched():
    keys = {"k3_kl": K3, "abs_diff_at_position/000004": "rollout_correction/abs_diff_at_position/000004"}
    keys |= {key: key for key in (K3, "policy/grad_norm", "rollout/reward_mean", "rollout/reward/digits_std")}
    assert {metric: Rule(metric=metric, above=1.0).key for metric in keys} == keys
    assert Rule(metric="ess", below=0.3, actions=["correct"], keep=True).label == "ess_below_0.3"
    assert Rule(metric="policy/grad_norm", above=1.0).label == "policy.grad_norm_above_1"


def test_a_guard_refuses_equal_names_and_rates_that_do_nothing():
    rule = Rule(metric="k3_kl", above=1.0)
    with pytest.raises(ValueError, match="two rules are called k3_kl_above_1"):
        Guard([rule, Rule(metric="k3_kl", above=1.0, patience=9)])
    with pytest.raises(ValueError, match="learning_rate_factor=1"):
        Guard([rule], learning_rate_factor=1.0)
    with pytest.raises(ValueError, match="learning_rate_floor=0"):
        Guard([rule], learning_rate_floor=0.0)


def test_the_default_rules_only_warn_and_are_calm_in_every_healthy_range():
    assert {action for rule in DEFAULT_RULES for action in rule.actions} == {"warn"}
    guard = Guard(DEFAULT_RULES)
    healthy = {K3: 1e-3, "rollout_correction/ess": 0.9, "rollout_correction/nonfinite_logprob_fraction": 0.0}
    for step in range(20):
        assert guard.judge(healthy, step) == []


def rates(scales: list[float], resume_at: int | None = None) -> list[float]:
    """The learning rate of each step, with the scale that is asked for after it."""
    config = OptimConfig(learning_rate=0.5, lr_scheduler_type="linear", warmup_steps=2)

    def build():
        optimiser = build_optimiser([torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))], config)
        return optimiser, build_schedule(optimiser, config, total_steps=10)

    optimiser, schedule = build()
    found = []
    for step, scale in enumerate(scales):
        if step == resume_at:
            saved = optimiser.state_dict(), schedule.state_dict()
            optimiser, schedule = build()
            optimiser.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
            scale_learning_rate(schedule, scales[step - 1])
        assert optimiser.param_groups[0]["lr"] == optimiser.param_groups[1]["lr"]
        found.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
        scale_learning_rate(schedule, scale)
    return found


def test_a_scaled_rate_follows_its_schedule_and_comes_back_to_it_exactly():
    plain = rates([1.0] * 8)
    assert plain == [0.0, 0.25, *(0.5 * (10 - step) / 8 for step in range(2, 8))]
    lowered = rates([1.0, 1.0, 0.5, 0.5, 0.1, 1.0, 1.0, 1.0])
    assert lowered == pytest.approx([0, 0.25, 0.5, 0.4375 / 2, 0.375 / 2, 0.03125, 0.25, 0.1875])
    assert lowered[6:] == plain[6:]
    assert rates([1.0, 1.0, 0.5, 0.5, 0.1, 1.0, 1.0, 1.0], resume_at=4) == lowered
