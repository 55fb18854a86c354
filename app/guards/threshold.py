"""Steers a correction's bound until a share of its weights is as asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.guards.run_control import Situation, Stage, Wishes, with_upper
from app.maths.correction import CorrectionConfig
from app.metrics.table import PREFIX

NAME = "adaptive_threshold"

Steered = Literal["ess_exact", "clipped_frac"]

GROW, SHRINK = 1.2, 0.5
"""Factors of the step after a change in the same and in the other direction: those of RPROP (Riedmiller and Braun
1993), which goes by the sign alone, too."""
SMALLEST_STEP = 1 / 16
"""Least step, as a share of the largest: the bound must be able to follow a run that changes."""


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig:
    """What is steered, to where, how fast.

    Raises:
        ValueError: naming the key.
    """

    metric: Steered
    """ess_exact: the bound is as loose as it can be with at least `target`. clipped_frac: as much is clipped."""
    target: float
    """Value of the metric that the bound is steered to, in (0, 1)."""
    tolerance: float
    """Width of the band in which the bound stays, as a share of 1 - target (ess_exact) or of target (clipped_frac)."""
    every_n_values: int
    """Values of which the mean is compared with the target, and after which the bound may change."""
    min_upper: float
    """Least bound, above 1."""
    max_upper: float
    """Largest bound, above `min_upper`."""
    max_change: float
    """Largest factor by which the bound on the log-ratio, log upper, changes at once."""

    def __post_init__(self) -> None:
        for name, fine, rule in (
            ("target", 0 < self.target < 1, "above 0 and below 1"),
            ("tolerance", 0 < self.tolerance < 1, "above 0 and below 1"),
            ("every_n_values", self.every_n_values >= 1, "at least 1"),
            ("min_upper", self.min_upper > 1, "above 1, the ratio of a perfect match"),
            ("max_upper", self.max_upper > self.min_upper, f"above min_upper={self.min_upper}"),
            ("max_change", self.max_change > 1, "above 1"),
        ):
            if not fine:
                raise ValueError(f"adaptive_threshold.{name}={getattr(self, name)}: must be {rule}")

    @property
    def band(self) -> tuple[float, float]:
        """Least and largest mean at which the bound stays."""
        if self.metric == "ess_exact":
            return self.target, self.target + self.tolerance * (1 - self.target)
        return self.target * (1 - self.tolerance), self.target * (1 + self.tolerance)

    def check(self, config: CorrectionConfig) -> None:
        """Refuse a correction whose bound cannot be steered by the metric.

        A truncated weight's effective sample size falls, and the clipped share of any control falls, as the bound
        rises. A mask's effective sample size does neither: too tight a mask loses it by zeros, too loose a one by
        spread.

        Raises:
            ValueError: naming the key.
        """
        if config.level == "none" or config.upper is None:
            raise ValueError(
                "adaptive_threshold.target is set, but model.correction has no upper bound to steer; set "
                "model.correction.level and upper, or adaptive_threshold.target to null"
            )
        if config.control == "mask" and self.metric == "ess_exact":
            raise ValueError(
                "adaptive_threshold.metric=ess_exact with control mask: a mask loses effective samples by being too "
                "tight as well as by being too loose, so there is no direction to steer in; use clipped_frac"
            )
        if not self.min_upper <= config.upper <= self.max_upper:
            raise ValueError(
                f"model.correction.upper={config.upper:g} is outside of adaptive_threshold.min_upper="
                f"{self.min_upper:g} and max_upper={self.max_upper:g}"
            )


@dataclass(frozen=True, kw_only=True)
class Change:
    """The bound changed, or would have."""

    before: float
    """Upper bound so far."""
    after: float
    """Upper bound from now on; equal to `before` at the end of its range."""
    mean: float
    """Mean of the metric under the bound so far."""
    why: str
    """The reason in words, with the numbers."""


class ThresholdController:
    """Moves the bound by steps that grow while the error keeps its sign and are halved when it changes.

    How much the metric answers to the bound differs by orders of magnitude between a mismatch of rounding and one of
    stale weights, but its direction is known; so the steps go by the sign of the error. The error is that of the mean
    over `every_n_values` values, all measured under the bound in force: an average that reaches back beyond the last
    change would answer late, and the bound would swing. Steps are factors on log upper, the bound on the log-ratio:
    the same step fits a bound of 1.05 and one of 5.
    """

    def __init__(self, config: ThresholdConfig) -> None:
        self.config = config
        self.upper: float | None = None
        """The bound. None: there is none to steer."""
        self._of: dict[str, Any] | None = None  # the correction that it is of
        self._step = math.log(config.max_change)
        self._direction = 0
        self._sum = 0.0
        self._count = 0

    def steer(self, config: CorrectionConfig) -> None:
        """Steer the bound of `config` from now on, from where it is configured; go on if it was steered already.

        One without a bound is left alone.
        """
        of = dataclasses.asdict(config)
        if of == self._of:
            return
        self._of, self._direction = of, 0
        self._step = math.log(self.config.max_change)
        self.upper = None if config.level == "none" else config.upper
        self._sum, self._count = 0.0, 0

    def see(self, value: float) -> Change | None:
        """Take in a value measured under the bound in force; return what follows, if it is time and something does."""
        if self.upper is None or not math.isfinite(value):
            return None
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self.config.every_n_values:
            return None
        mean = self._sum / self._count
        self._sum, self._count = 0.0, 0
        low, high = self.config.band
        if low <= mean <= high:
            return None
        # a looser bound clips less, and leaves fewer effective samples
        looser = mean > high
        return self._move(1 if looser else -1, mean)

    def _move(self, direction: int, mean: float) -> Change:
        assert self.upper is not None
        largest = math.log(self.config.max_change)
        if self._direction:
            factor = GROW if direction == self._direction else SHRINK
            self._step = min(max(self._step * factor, largest * SMALLEST_STEP), largest)
        self._direction = direction
        before = self.upper
        moved = math.exp(math.log(before) * math.exp(direction * self._step))
        self.upper = min(max(moved, self.config.min_upper), self.config.max_upper)
        return Change(before=before, after=self.upper, mean=mean, why=self._why(before, self.upper, mean))

    def _why(self, before: float, after: float, mean: float) -> str:
        low, high = self.config.band
        limit = f"< {low:.4g}" if mean < low else f"> {high:.4g}"
        said = f"{self.config.metric} {mean:.4g} {limit}: upper {before:.4g}"
        return f"{said} -> {after:.4g}" if after != before else f"{said} stays, the end of its range"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must carry, the same on every rank."""
        return {
            "upper": self.upper,
            "of": self._of,
            "step": self._step,
            "direction": self._direction,
            "sum": self._sum,
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; its bound is brought into the range that is configured now."""
        upper = state["upper"]
        self.upper = None if upper is None else min(max(upper, self.config.min_upper), self.config.max_upper)
        self._of, self._direction = state["of"], state["direction"]
        self._step = min(state["step"], math.log(self.config.max_change))
        self._sum, self._count = state["sum"], state["count"]


class BoundSteering:
    """The threshold controller as a watcher of the run: steers the bound of the correction that is asked for.

    Where the guard has switched to another correction, the bound of that one is steered, from where it is configured.
    """

    name: str = NAME
    stage: Stage = "bound"

    def __init__(self, controller: ThresholdController) -> None:
        """Steer by `controller`."""
        self.controller = controller
        self._changes: list[tuple[int, Change]] = []  # that nobody has reported yet

    def offers(self) -> tuple[CorrectionConfig, ...]:
        """Offer no correction of its own."""
        return ()

    def check(self, possible: tuple[CorrectionConfig, ...]) -> None:
        """Refuse corrections whose bound cannot be steered; one without weights passes beside one that has them.

        Raises:
            ValueError: naming the key.
        """
        bounded = [config for config in possible if config.level != "none"]
        for config in bounded or possible:
            self.controller.config.check(config)

    def see(self, values: Mapping[str, float], situation: Situation) -> Wishes:
        """Take in a value, unless it was measured under another bound than the one asked for."""
        self.controller.steer(situation.asked)
        measured = values.get(PREFIX + self.controller.config.metric)
        upper = self.controller.upper
        asked = situation.asked if upper is None else with_upper(situation.asked, upper)
        if measured is not None and asked == situation.in_force:
            change = self.controller.see(measured)
            if change is not None:
                self._changes.append((situation.step, change))
        return self.wishes(situation.asked)

    def wishes(self, asked: CorrectionConfig) -> Wishes:
        """Return the bound that the controller has come to for the correction that is asked for."""
        self.controller.steer(asked)
        return Wishes(upper=self.controller.upper)

    def logged(self, situation: Situation) -> dict[str, float]:
        """Return the bounds under which the values were measured."""
        bounds = {f"{NAME}/upper": situation.in_force.upper, f"{NAME}/lower": situation.in_force.lower}
        return {key: bound for key, bound in bounds.items() if bound is not None}

    def take_changes(self) -> list[tuple[int, Change]]:
        """Return what changed since the last call, each with its optimiser step."""
        changes, self._changes = self._changes, []
        return changes

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller."""
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.controller.load_state_dict(state)
