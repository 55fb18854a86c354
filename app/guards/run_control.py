"""RunControl: the one place that changes a run while it runs.

Watchers see the values that are logged, the same on every rank, and answer with wishes. The wishes are merged once,
applied once, between two optimiser steps, and saved once. Nobody else writes the state that is kept here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from torch.optim.lr_scheduler import LambdaLR

from app.errors import LockstepError
from app.guards.learning_rate import scale_learning_rate
from app.maths.correction import CorrectionConfig
from app.maths.objective import LossConfig, check_combination, needs_step_sums

Stage = Literal["correction", "bound"]
"""What a watcher decides, in the order in which watchers are asked: who steers a bound must know whose bound it is."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What watchers want changed. None: nothing is asked for, the configuration stands."""

    correction: CorrectionConfig | None = None
    """A correction to use in the place of the configured one."""
    upper: float | None = None
    """An upper bound to use in the place of that correction's own (see `with_upper`)."""
    learning_rate_scale: float | None = None
    """What the scheduled learning rate is to be multiplied by, above 0."""
    stop: LockstepError | None = None
    """The error with which the run is to end, once the step is saved."""

    def merged(self, later: Wishes) -> Wishes:
        """Return both wishes in one: of two different ones the later watcher's stands; rate scales multiply."""
        scales = [scale for scale in (self.learning_rate_scale, later.learning_rate_scale) if scale is not None]
        return Wishes(
            correction=self.correction if later.correction is None else later.correction,
            upper=self.upper if later.upper is None else later.upper,
            learning_rate_scale=math.prod(scales) if scales else None,
            stop=self.stop or later.stop,
        )


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a watcher may know of the run besides the logged values."""

    step: int
    """Optimiser steps done when the values were logged."""
    in_force: CorrectionConfig
    """The correction under which the logged values were measured."""
    asked: CorrectionConfig
    """The correction that is asked for so far, with its own bound: the configured one, or an earlier watcher's wish."""


class Watcher(Protocol):
    """Somebody who decides by logged values. All that it answers is a function of what it has seen."""

    name: str
    """Its key in checkpoints; unique."""
    stage: Stage
    """What it decides, and so when it is asked."""

    def offers(self) -> tuple[CorrectionConfig, ...]:
        """Return every correction that it may ask for, bounds aside."""

    def check(self, possible: tuple[CorrectionConfig, ...]) -> None:
        """Refuse what it could not work with, out of every correction that the run may use.

        Raises:
            ValueError: naming the key.
        """

    def see(self, values: Mapping[str, float], situation: Situation) -> Wishes:
        """Take in the values of a logged step, and return what is wanted now."""

    def wishes(self, asked: CorrectionConfig) -> Wishes:
        """Return what is wanted without new values, as after a resume; `asked` as in Situation."""

    def logged(self, situation: Situation) -> Mapping[str, float]:
        """Return what to log beside the values that it has just seen, by key."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry, plain values, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""


class RunControl:
    """Holds the correction in force, asks the watchers, and applies what they want between two optimiser steps.

    Raises:
        ValueError: settings that contradict each other; the message names the keys.
    """

    def __init__(self, configured: CorrectionConfig, loss: LossConfig) -> None:
        check_combination(loss, configured)
        self._configured = configured
        self._loss = loss
        self._in_force = configured
        self._wishes = Wishes()
        self._rollout_over = True
        self._watchers: dict[str, Watcher] = {}

    @property
    def configured(self) -> CorrectionConfig:
        """The correction of the configuration."""
        return self._configured

    @property
    def correction(self) -> CorrectionConfig:
        """The correction in force: the next micro-batch is corrected by it."""
        return self._in_force

    @property
    def needs_step_sums(self) -> bool:
        """Whether a micro-batch needs sums over its whole optimiser step."""
        return needs_step_sums(self._loss, self._in_force)

    @property
    def pending(self) -> bool:
        """Whether what is asked for waits for the end of the rollout."""
        return self._wanted != self._in_force

    @property
    def stop(self) -> LockstepError | None:
        """The error with which the run is to end after this optimiser step."""
        return self._wishes.stop

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher, or replace the one of its name."""
        self._watchers[watcher.name] = watcher
        order = get_args(Stage)
        self._watchers = dict(sorted(self._watchers.items(), key=lambda item: order.index(item[1].stage)))

    def check(self) -> None:
        """Check every correction that the run may use, by the loss and by every watcher; call it before a run.

        A stop that an earlier run of the same module ended with is forgotten.

        Raises:
            LockstepError: naming the key.
        """
        self._wishes = dataclasses.replace(self._wishes, stop=None)
        possible = [self._configured]
        for watcher in self._watchers.values():
            for config in watcher.offers():
                try:
                    check_combination(self._loss, config)
                except ValueError as error:
                    raise LockstepError(f"{watcher.name}.correction: {error}") from error
                possible.append(config)
        try:
            for watcher in self._watchers.values():
                watcher.check(tuple(dict.fromkeys(possible)))
        except ValueError as error:
            raise LockstepError(str(error)) from error

    def see(self, values: Mapping[str, float], step: int) -> dict[str, float]:
        """Show the values of a logged step to the watchers, in their order; return what to log beside them.

        All ranks must call it together, with equal values, between two optimiser steps.
        """
        wishes = Wishes(stop=self.stop)
        logged: dict[str, float] = {}
        for watcher in self._watchers.values():
            asked = wishes.correction or self._configured
            situation = Situation(step=step, in_force=self._in_force, asked=asked)
            wishes = wishes.merged(watcher.see(values, situation))
            logged.update(watcher.logged(situation))
        self._wishes = wishes
        return logged

    def ask_to_stop(self, error: LockstepError) -> None:
        """Let the run end with `error` when the optimiser step is over and saved. All ranks must ask together."""
        self._wishes = self._wishes.merged(Wishes(stop=error))

    def begin_batch(self, ends_rollout: bool) -> None:
        """Note whether the micro-batch that begins is the last one of its rollout."""
        self._rollout_over = ends_rollout

    def apply(self, schedule: LambdaLR) -> None:
        """Put what is asked for into force: correction and bound as soon as they can be, the learning rate at once.

        Rows are scored, and sums over whole steps are taken, when they are sampled. A correction that concerns these
        waits for the end of the rollout.
        """
        self._apply_correction()
        if self._wishes.learning_rate_scale is not None:
            scale_learning_rate(schedule, self._wishes.learning_rate_scale)

    def _apply_correction(self) -> None:
        then, now = self._in_force, self._wanted
        concerns_rows = then.bypass != now.bypass or any(needs_step_sums(self._loss, each) for each in (then, now))
        if self._rollout_over or not concerns_rows:
            self._in_force = now

    @property
    def _wanted(self) -> CorrectionConfig:
        asked = self._wishes.correction or self._configured
        return asked if self._wishes.upper is None else with_upper(asked, self._wishes.upper)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry: the watchers' state, and a correction that only waits to be replaced."""
        return {
            "in_force": dataclasses.asdict(self._in_force) if self.pending else None,
            "watchers": {name: watcher.state_dict() for name, watcher in self._watchers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, perhaps inside a rollout whose rows were scored for another correction."""
        self._wishes = Wishes()
        for name, watcher in self._watchers.items():
            if name in state["watchers"]:
                watcher.load_state_dict(state["watchers"][name])
            asked = self._wishes.correction or self._configured
            self._wishes = self._wishes.merged(watcher.wishes(asked))
        waiting = state["in_force"]
        self._in_force = self._wanted if waiting is None else CorrectionConfig(**waiting)
        self._rollout_over = waiting is None


def with_upper(config: CorrectionConfig, upper: float) -> CorrectionConfig:
    """Return `config` with another upper bound; the lower bound of a mask moves with it.

    Bounds are on ratios, and what they limit is the log-ratio: log lower / log upper stays as it is in `config`, so
    that [0.5, 2] becomes [1/3, 3].

    Args:
        config: with an `upper`, which with a mask is not 1.
        upper: above 0.
    """
    if config.control == "truncate" or config.lower is None:
        return dataclasses.replace(config, upper=upper)
    assert config.upper is not None
    share = math.log(config.lower) / math.log(config.upper)
    return dataclasses.replace(config, lower=math.exp(share * math.log(upper)), upper=upper)
