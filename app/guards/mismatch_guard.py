"""The mismatch guard as a watcher of the run: counts values against rules, and wishes what fired rules ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import LockstepError
from app.guards.rules import Action, Rule, RuleState, next_state
from app.guards.run_control import Situation, Stage, Wishes
from app.maths.correction import CorrectionConfig, preset

NAME = "mismatch_guard"

DEFAULT_CORRECTION = "swift/token_truncate"
"""Preset that `correct` switches on where the run has no correction of its own."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A rule fired or recovered."""

    rule: Rule
    """The rule that fired or recovered."""
    fired: bool
    """True: the rule fired. False: it recovered."""
    value: float
    """The last value of the rule's metric."""
    since: int
    """Optimiser step of the first value beyond the threshold."""
    step: int
    """Optimiser steps done when the last value was logged."""

    def __str__(self) -> str:
        rule = self.rule
        if not self.fired:
            return (
                f"mismatch_guard: {rule.metric} = {self.value:.4g} at step {self.step} has recovered "
                f"({rule.patience} in a row at {rule.recovery:g} or better), after step {self.since}"
            )
        return (
            f"mismatch_guard: {rule.metric} = {self.value:.4g} {rule.threshold} at step {self.step}, beyond it since "
            f"step {self.since} ({rule.patience} logged values in a row)"
        )


class Guard:
    """Counts values against rules, as a Watcher. What it answers depends on what it has seen alone: all ranks agree.

    `prepare` must be called before the run, if a rule has an action that needs it.
    """

    name: str = NAME
    stage: Stage = "correction"

    def __init__(
        self, rules: Sequence[Rule], learning_rate_factor: float = 0.5, learning_rate_floor: float = 0.1
    ) -> None:
        """Start calm.

        Args:
            rules: with different names.
            learning_rate_factor: each firing of `lower_learning_rate` multiplies the rate by it; in (0, 1).
            learning_rate_floor: the least share of the scheduled rate that is left; in (0, 1].

        Raises:
            ValueError: naming the key.
        """
        self.rules = {rule.label: rule for rule in rules}
        if len(self.rules) < len(rules):
            labels = [rule.label for rule in rules]
            twice = next(label for label in labels if labels.count(label) > 1)
            raise ValueError(f"mismatch_guard.rules: two rules are called {twice}; give one of them a name")
        if bad := next((label for label in self.rules if "/" in label), None):
            raise ValueError(f"mismatch_guard.rules: the name {bad} has a slash")
        if not 0 < learning_rate_factor < 1:
            raise ValueError(f"mismatch_guard.learning_rate_factor={learning_rate_factor}: must be above 0 and below 1")
        if not 0 < learning_rate_floor <= 1:
            raise ValueError(f"mismatch_guard.learning_rate_floor={learning_rate_floor}: must be above 0 and at most 1")
        self.learning_rate_factor = learning_rate_factor
        self.learning_rate_floor = learning_rate_floor
        self.states = {label: RuleState() for label in self.rules}
        self.replacement: CorrectionConfig | None = None
        """What the action `correct` switches to."""
        self._after_stop = ""
        self._events: list[Event] = []  # that nobody has reported yet

    def prepare(self, configured: CorrectionConfig, given: CorrectionConfig | None, after_stop: str) -> None:
        """Find out what `correct` switches to, and what becomes of a run that `stop` ends.

        Args:
            configured: the run's own correction.
            given: the correction that the guard was configured with, if it was.
            after_stop: what the message of `stop` says of the run.

        Raises:
            ValueError: if `correct` would change nothing.
        """
        self._after_stop = after_stop
        if self.asks_for("correct"):
            self.replacement = replacement(configured, given)

    def asks_for(self, action: Action) -> bool:
        """Whether any rule has `action`."""
        return any(action in rule.actions for rule in self.rules.values())

    @property
    def corrects(self) -> bool:
        """Whether the correction should be on."""
        return any("correct" in rule.actions and self.states[label].holds for label, rule in self.rules.items())

    @property
    def learning_rate_scale(self) -> float:
        """What the scheduled learning rate should be multiplied by."""
        times = sum(state.lowered for state in self.states.values())
        return max(self.learning_rate_factor**times, self.learning_rate_floor) if times else 1.0

    @property
    def levels(self) -> dict[str, int]:
        """Name of a rule -> 0 calm, 1 counting, 2 fired."""
        return {label: state.level for label, state in self.states.items()}

    def judge(self, values: Mapping[str, float], step: int) -> list[Event]:
        """Take in the values logged at an optimiser step; a rule whose metric is not among them stays as it is."""
        events = []
        for label, rule in self.rules.items():
            if (value := values.get(rule.key)) is None:
                continue
            then = self.states[label]
            now = self.states[label] = next_state(rule, then, value, step)
            if now.fired != then.fired:
                since = now.since if now.fired else then.since
                assert since is not None
                events.append(Event(rule=rule, fired=now.fired, value=value, since=since, step=step))
        return events

    def offers(self) -> tuple[CorrectionConfig, ...]:
        """Return what `correct` switches to."""
        return () if self.replacement is None else (self.replacement,)

    def check(self, possible: tuple[CorrectionConfig, ...]) -> None:
        """Take any correction: `prepare` has refused what would do nothing."""

    def see(self, values: Mapping[str, float], situation: Situation) -> Wishes:
        """Take in the values of a logged step, keep what happened for `take_events`, and return what is wanted."""
        events = self.judge(values, situation.step)
        self._events += events
        stopping = next((event for event in events if event.fired and "stop" in event.rule.actions), None)
        stop = None if stopping is None else LockstepError(f"{stopping}; {self._after_stop}")
        return self.wishes(situation.asked).merged(Wishes(stop=stop))

    def wishes(self, asked: CorrectionConfig) -> Wishes:
        """Return the correction and the learning rate that fired rules ask for."""
        lowers = self.asks_for("lower_learning_rate")
        return Wishes(
            correction=self.replacement if self.corrects else None,
            learning_rate_scale=self.learning_rate_scale if lowers else None,
        )

    def logged(self, situation: Situation) -> dict[str, float]:
        """Return the level of each rule, as `mismatch_guard/<rule>`."""
        return {f"{NAME}/{label}": float(level) for label, level in self.levels.items()}

    def take_events(self) -> list[Event]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    def state_dict(self) -> dict[str, Any]:
        """State by rule. One that ended the run starts anew: the run that goes on has its patience again."""
        return {
            label: dataclasses.asdict(RuleState() if "stop" in self.rules[label].actions and state.fired else state)
            for label, state in self.states.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from a checkpoint; rules that it does not know start calm."""
        self.states |= {label: RuleState(**state[label]) for label in self.rules if label in state}


def replacement(own: CorrectionConfig, given: CorrectionConfig | None) -> CorrectionConfig:
    """Return what the action `correct` switches to.

    Args:
        own: the run's own correction.
        given: the correction that the guard was configured with. None: the run's own without `log_only`, or
            `DEFAULT_CORRECTION` where it has none.

    Raises:
        ValueError: if it changes nothing.
    """
    if given is None:
        if own.changes_gradients:
            raise ValueError(
                "model.correction corrects already; say what the action correct should switch to, or set "
                "model.correction.log_only to true"
            )
        without = dataclasses.replace(own, log_only=False)
        given = without if without.changes_gradients else preset(DEFAULT_CORRECTION)
    if given == own or not given.changes_gradients:
        raise ValueError("it corrects no other than model.correction does; set its preset or level")
    return given
