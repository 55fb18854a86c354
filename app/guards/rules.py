"""Rules on logged values: when one has been beyond its threshold long enough, and when it has recovered."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

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
    return info.group in ("correction", "dropped data") and "raw_ratio" not in info.key


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
    """Whether it has fired and not recovered since."""
    since: int | None = None
    """Optimiser step of the first value of the row that is counted, or that made it fire."""
    holds: bool = False
    """Whether what it changed is still changed."""
    lowered: int = 0
    """How often it has lowered the learning rate, as far as that is not undone."""

    @property
    def level(self) -> int:
        """0: calm. 1: counting. 2: fired."""
        return 2 if self.fired else int(self.count > 0)


def next_state(rule: Rule, state: RuleState, value: float, step: int) -> RuleState:
    """Return the state of a rule after one more value of its metric, logged at `step`."""
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
