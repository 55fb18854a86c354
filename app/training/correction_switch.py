"""The correction in force, and the one asked for: a change falls between optimiser steps, or between rollouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from app.maths.correction import CorrectionConfig
from app.maths.objective import LossConfig
from app.training.step_correction import StepCorrection


class CorrectionSwitch:
    """Holds the run's correction, one that stands in for it, and a bound that is steered, and applies them in time.

    Whoever asks does so between two optimiser steps, with the same values on all ranks.

    Raises:
        ValueError: settings that contradict each other; the message names the keys.
    """

    def __init__(self, configured: CorrectionConfig, loss: LossConfig, off_policy_delta: float | None) -> None:
        self.configured = configured
        """What the configuration says."""
        self.in_force = StepCorrection(configured, loss, off_policy_delta)
        """What the next micro-batch is corrected by."""
        self.offered: list[CorrectionConfig] = [configured]
        """Every correction that the run may use, but for the bound."""
        self.replacement: CorrectionConfig | None = None
        """Asked for in place of the configured one."""
        self.upper: float | None = None
        """Asked for in place of the bound of that one (see `with_upper`)."""
        self.rollout_over = True
        """Whether the next micro-batch is the first of a rollout that is not sampled yet."""

    def offer(self, config: CorrectionConfig) -> StepCorrection:
        """Say that `config` may be asked for later, and return it as it will be applied.

        Raises:
            ValueError: if the loss contradicts it.
        """
        found = self._applied(config)
        if config not in self.offered:
            self.offered.append(config)
        return found

    @property
    def base(self) -> CorrectionConfig:
        """What is asked for, with its own bound."""
        return self.configured if self.replacement is None else self.replacement

    @property
    def wanted(self) -> CorrectionConfig:
        """What is asked for."""
        return self.base if self.upper is None else with_upper(self.base, self.upper)

    @property
    def pending(self) -> bool:
        """Whether what is asked for is not in force yet."""
        return self.wanted != self.in_force.correction

    def take_up(self) -> bool:
        """Put what is asked for into force, and return whether it was not before.

        Rows are scored, and sums over whole steps are taken, when they are sampled. Where the change concerns these it
        waits for the end of the rollout.
        """
        if not self.pending:
            return False
        then, now = self.in_force, self._applied(self.wanted)
        concerns_rows = then.correction.bypass != now.correction.bypass or then.needs_step_sums or now.needs_step_sums
        if concerns_rows and not self.rollout_over:
            return False
        self.in_force = now
        return True

    def state_dict(self) -> dict[str, Any]:
        """What is in force while another is asked for; who asks saves the rest."""
        return {"in_force": dataclasses.asdict(self.in_force.correction) if self.pending else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on inside a rollout whose rows were scored for another correction than the one asked for."""
        if state["in_force"] is not None:
            self.in_force = self._applied(CorrectionConfig(**state["in_force"]))
            self.rollout_over = False

    def _applied(self, config: CorrectionConfig) -> StepCorrection:
        return StepCorrection(config, self.in_force.loss, self.in_force.off_policy_delta)


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
