"""RunControl: who is asked when, what is merged, when it is applied, what a checkpoint carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from app.errors import LockstepError
from app.guards.run_control import RunControl, Situation, Stage, Wishes
from app.maths.correction import CorrectionConfig, preset
from app.maths.objective import LossConfig

NONE = CorrectionConfig()
TOKEN = preset("swift/token_truncate")
NORMALISED = CorrectionConfig(level="token", upper=2.0, batch_normalize=True)
ASKED: list[tuple[str, Situation]] = []


@dataclass
class Wanting:
    """A watcher that always wants the same, once it has seen a step."""

    name: str
    stage: Stage
    wants: Wishes
    seen: int = 0
    offered: tuple[CorrectionConfig, ...] = ()
    checked: list[tuple[CorrectionConfig, ...]] = field(default_factory=list)

    def offers(self) -> tuple[CorrectionConfig, ...]:
        return self.offered

    def check(self, possible: tuple[CorrectionConfig, ...]) -> None:
        self.checked.append(possible)

    def see(self, values: Mapping[str, float], situation: Situation) -> Wishes:
        ASKED.append((self.name, situation))
        self.seen += 1
        return self.wants

    def wishes(self, asked: CorrectionConfig) -> Wishes:
        return self.wants if self.seen else Wishes()

    def logged(self, situation: Situation) -> dict[str, float]:
        return {self.name: float(situation.step)}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def schedule() -> LambdaLR:
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return LambdaLR(optimiser, lambda step: 1 / (1 + step))


def steering(upper: float = 1.5) -> Wanting:
    return Wanting("bound", "bound", Wishes(upper=upper))


def switching(correction: CorrectionConfig = TOKEN) -> Wanting:
    return Wanting("switch", "correction", Wishes(correction=correction), offered=(correction,))


def test_watchers_are_asked_by_stage_and_the_later_ones_know_what_the_earlier_ones_want():
    ASKED.clear()
    control = RunControl(NONE, LossConfig())
    control.watch(steering())  # whoever comes first
    control.watch(switching())
    assert control.see({}, step=7) == {"switch": 7.0, "bound": 7.0}
    assert [name for name, _ in ASKED] == ["switch", "bound"]
    assert [situation.asked for _, situation in ASKED] == [NONE, TOKEN]
    assert {situation.in_force for _, situation in ASKED} == {NONE}
    assert control.correction == NONE  # nothing is in force before it is applied
    assert control.pending
    control.apply(schedule())
    assert control.correction == CorrectionConfig(level="token", upper=1.5)
    assert not control.pending


def test_wishes_are_merged_once():
    stop, other = LockstepError("first"), LockstepError("second")
    merged = Wishes(correction=TOKEN, learning_rate_scale=0.5, stop=stop).merged(
        Wishes(upper=1.5, learning_rate_scale=0.25, stop=other)
    )
    assert merged == Wishes(correction=TOKEN, upper=1.5, learning_rate_scale=0.125, stop=stop)
    assert Wishes(correction=TOKEN).merged(Wishes(correction=NONE)).correction == NONE


def test_a_correction_that_concerns_rows_waits_for_the_end_of_the_rollout_and_a_rate_does_not():
    control, rate = RunControl(NONE, LossConfig()), schedule()
    control.watch(Wanting("both", "correction", Wishes(correction=NORMALISED, learning_rate_scale=0.5)))
    control.begin_batch(ends_rollout=False)
    control.see({}, step=1)
    control.apply(rate)
    assert control.correction == NONE
    assert control.pending
    assert rate.optimizer.param_groups[0]["lr"] == 0.5
    control.begin_batch(ends_rollout=True)
    control.apply(rate)  # without new values: it was asked for already
    assert control.correction == NORMALISED
    assert rate.optimizer.param_groups[0]["lr"] == 0.5  # half of the schedule's, however often it is applied


def test_without_a_wish_the_configuration_stands_and_a_switch_is_undone():
    control, switch = RunControl(NONE, LossConfig()), switching()
    control.watch(switch)
    control.see({}, step=1)
    control.apply(schedule())
    assert control.correction == TOKEN
    switch.wants = Wishes()
    control.see({}, step=2)
    control.apply(schedule())
    assert control.correction == NONE


def test_a_stop_stays_asked_for():
    control = RunControl(NONE, LossConfig())
    control.watch(switching())
    control.ask_to_stop(LockstepError("hopeless"))
    control.see({}, step=1)
    assert str(control.stop) == "hopeless"
    control.check()  # another run begins
    assert control.stop is None


@pytest.mark.parametrize(("correction", "waits"), [(TOKEN, False), (NORMALISED, True)])
def test_a_resumed_control_is_the_one_that_was_saved(correction, waits, tmp_path):
    first, second = (RunControl(NONE, LossConfig()) for _ in range(2))
    for control in (first, second):
        control.watch(switching(correction))
    first.begin_batch(ends_rollout=False)
    first.see({}, step=1)
    first.apply(schedule())
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.correction == first.correction == (NONE if waits else correction)
    assert second.pending == first.pending == waits
    second.apply(schedule())  # as at the start of training: still inside the rollout
    assert second.correction == first.correction
    second.begin_batch(ends_rollout=True)
    second.apply(schedule())
    assert second.correction == correction


def test_every_correction_that_may_come_is_checked_before_the_run():
    control, steer = RunControl(NONE, LossConfig()), steering()
    control.watch(steer)
    control.watch(switching())
    control.check()
    assert steer.checked == [(NONE, TOKEN)]
    control.watch(switching(CorrectionConfig(level="token", upper=2.0, bypass=True)))
    with pytest.raises(LockstepError, match=r"switch\.correction: correction\.bypass=true"):
        control.check()


def test_settings_that_contradict_each_other_are_refused_at_once():
    with pytest.raises(ValueError, match=r"correction\.bypass with batch_normalize or with loss\.denominator=kept"):
        RunControl(preset("verl/bypass"), LossConfig(denominator="kept"))
