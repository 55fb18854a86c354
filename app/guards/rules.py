"""Rules on logged values: when one has been beyond its threshold long enough, and when it has recovered."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from app.dashboard.keys import ALL, find
from app.metrics.spec import KeyInfo
from app.metrics.table import PREFIX

Action = Literal["warn", "log_rows", "correct", "lower_learning_rate", "stop"]

RECOVERY_MARGIN = 0.2
"""By this share of its size the default of `recover` is on the healthy side of the threshold."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is watched, where it is too far, and what is done then.

    Raises:
        ValueError: a metric that is not known, or settings that contradict each other or would do nothing.
    """

    metric: str
    """A logged value: of `rollout_correction/` by its short name (k3_kl), others by their key (policy/grad_norm)."""
    above: float | None = None
    """Values above it are too large. Give either this or below."""
    below: float | None = None
    """Values below it are too small."""
    patience: int = 3
    """The rule fires at so many values beyond the threshold in a row, and so many in a row must satisfy `recover`
    before it can fire again. A value comes every trainer.log_every_n_steps optimiser steps."""
    recover: float | None = None
    """Values at or beyond it, on the healthy side of the threshold, count as recovered. null: the threshold, moved to
    the healthy side by 20 % of its size."""
    actions: list[Action] = field(default_factory=lambda: ["warn"])
    """What is done when it fires: warn, log_rows, correct, lower_learning_rate, stop."""
    keep: bool = False
    """What `correct` and `lower_learning_rate` changed stays changed after recovery."""
    name: str | None = None
    """Its name in logs. null: made of metric and threshold."""

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise self._refused("give one threshold, above or below")
        for key in ("above", "below", "recover"):
            if (value := getattr(self, key)) is not None and not math.isfinite(value):
                raise self._refused(f"{key}={value} is not finite")
        if self.patience < 1:
            raise self._refused(f"patience={self.patience}: must be at least 1")
        if self.recover is not None and self.is_beyond(self.recover):
            raise self._refused(f"recover={self.recover:g} is beyond the threshold {self.threshold}")
        self._check_actions(_known(self))

    @property
    def key(self) -> str:
        """Full key of the metric."""
        return self.metric if find(self.metric) else PREFIX + self.metric

    @property
    def label(self) -> str:
        """Name in logs, without slashes: it is part of a tag."""
        return self.name or f"{self.metric}_{'above' if self.below is None else 'below'}_{self._limit:g}".replace(
            "/", "."
        )

    @property
    def threshold(self) -> str:
        """The threshold as one would write it."""
        return f"{'>' if self.below is None else '<'} {self._limit:g}"

    @property
    def recovery(self) -> float:
        """The value of `recover` in force."""
        if self.recover is not None:
            return self.recover
        margin = RECOVERY_MARGIN * abs(self._limit)
        return self._limit - margin if self.below is None else self._limit + margin

    def is_beyond(self, value: float) -> bool:
        """Whether a value is too far; NaN is."""
        return not (value <= self._limit if self.below is None else value >= self._limit)

    def has_recovered(self, value: float) -> bool:
        """Whether a value is as healthy as `recover` asks."""
        return value <= self.recovery if self.below is None else value >= self.recovery

    @property
    def _limit(self) -> float:
        return self.above if self.above is not None else self.below  # type: ignore[return-value]

    def _check_actions(self, info: KeyInfo) -> None:
        unknown = [action for action in self.actions if action not in get_args(Action)]
        if unknown or not self.actions:
            raise self._refused(f"actions={list(self.actions)}: choose from {', '.join(get_args(Action))}")
        changes = [action for action in self.actions if action in ("correct", "lower_learning_rate")]
        if "stop" in self.actions and changes:
            raise self._refused(f"{changes[0]} does nothing to a run that stops; make two rules of different patience")
        if self.keep and not changes:
            raise self._refused("keep does nothing without the action correct or lower_learning_rate")
        if "correct" in self.actions and not self.keep and follows_correction(info):
            raise self._refused(
                "the correction itself changes this value: it would look recovered and be switched off again; add "
                "keep: true, or watch k3_kl"
            )

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"mismatch_guard.rules, the one of {self.metric}: {why}")


def follows_correction(info: KeyInfo) -> bool:
    """Whether a value is of the weights or of what they leave, not of the mismatch alone."""
    return info.group in ("correction", "losses of data") and "raw_ratio" not in info.key


def _known(rule: Rule) -> KeyInfo:
    """What the rule's metric means.

    Raises:
        ValueError: if it is not among the values that are logged with a step, the same on all ranks.
    """
    seen = {info.key.removeprefix(PREFIX): info for info in ALL if _is_seen(info)}
    info = find(rule.key)
    if info is None or not _is_seen(info):
        near = difflib.get_close_matches(rule.metric, seen, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise rule._refused(
            f"it is not logged with every step; {hint}Every rollout_correction/, policy/ and rollout/ key of "
            "app/README.md can be watched"
        )
    return info


def _is_seen(info: KeyInfo) -> bool:
    return info.when in ("every step", "detailed", "rollout") and info.key.split("/")[0] in (
        PREFIX.rstrip("/"),
        "policy",
        "rollout",
    )


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """Where a rule is."""

    count: int = 0
    """Values in a row: beyond the threshold, or once fired, recovered ones."""
    fired: bool = False
    """It has fired and not recovered."""
    since: int | None = None
    """Optimiser step of the first value of the row that is counted, or that made it fire."""
    holds: bool = False
    """What it changed is still changed."""
    lowered: int = 0
    """How often it has lowered the learning rate, as far as that is not undone."""

    @property
    def level(self) -> int:
        """0: calm. 1: counting. 2: fired."""
        return 2 if self.fired else int(self.count > 0)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A rule fired or recovered."""

    rule: Rule
    """Which."""
    fired: bool
    """False: it recovered."""
    value: float
    """The last value."""
    since: int
    """Optimiser step of the first value beyond the threshold."""
    step: int
    """Optimiser steps done."""

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
    """Counts values against rules. All that it answers is a function of what it has seen: equal on all ranks."""

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

    def see(self, values: Mapping[str, float], step: int) -> list[Event]:
        """Take in the values logged at an optimiser step; a rule whose metric is not among them stays as it is."""
        events = []
        for label, rule in self.rules.items():
            if (value := values.get(rule.key)) is None:
                continue
            then = self.states[label]
            now = self.states[label] = _next(rule, then, value, step)
            if now.fired != then.fired:
                since = now.since if now.fired else then.since
                assert since is not None
                events.append(Event(rule=rule, fired=now.fired, value=value, since=since, step=step))
        return events

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State by rule. One that ended the run starts anew: the run that goes on has its patience again."""
        return {
            label: dataclasses.asdict(RuleState() if "stop" in self.rules[label].actions and state.fired else state)
            for label, state in self.states.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from a checkpoint; rules that it does not know start calm."""
        self.states |= {label: RuleState(**state[label]) for label in self.rules if label in state}


def _next(rule: Rule, state: RuleState, value: float, step: int) -> RuleState:
    """The state after one more value."""
    if not state.fired:
        if not rule.is_beyond(value):
            return dataclasses.replace(state, count=0, since=None)
        count, since = state.count + 1, step if state.since is None else state.since
        if count < rule.patience:
            return dataclasses.replace(state, count=count, since=since)
        lowered = state.lowered + ("lower_learning_rate" in rule.actions)
        return RuleState(fired=True, since=since, holds=True, lowered=lowered)
    if not rule.has_recovered(value):
        return dataclasses.replace(state, count=0)
    if state.count + 1 < rule.patience:
        return dataclasses.replace(state, count=state.count + 1)
    return RuleState(holds=state.holds and rule.keep, lowered=state.lowered if rule.keep else 0)
