"""Settings as YAML gives them, where that is not the form the formulas want."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from app.maths.correction import CorrectionConfig, RejectionRule, preset
from app.maths.correction.config import BoundLevel, Control, Level

AsPreset = Literal["preset"]
"""Stands for: as the preset has it. null means: none."""


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """A preset and overrides; a field left at `preset` is as the preset has it (see CorrectionConfig for each)."""

    preset: str | None = "swift/token_truncate"
    """Name of a preset of app.maths.correction.PRESETS. null: start from no correction, only measure."""
    level: Level | AsPreset = "preset"
    """Level of the importance weight: token ratio, sequence product, geometric mean, or none."""
    bound_level: BoundLevel | AsPreset | None = "preset"
    """Level at which control `mask` tests its bounds. null: as `level`."""
    control: Control | AsPreset = "preset"
    """truncate: clamp the weight to the bounds. mask: weight 0 outside them."""
    lower: float | AsPreset | None = "preset"
    """Least ratio train / rollout. null: no bound."""
    upper: float | AsPreset | None = "preset"
    """Largest ratio train / rollout. null: no bound."""
    rejection: list[dict[str, Any]] | AsPreset | None = "preset"
    """Rules that drop tokens or rows, each {level, statistic, lower, upper} (see RejectionRule). null: none."""
    veto_low: float | AsPreset | None = "preset"
    """Rows with a token ratio below it are dropped. null: no veto."""
    veto_high: float | AsPreset | None = "preset"
    """Rows with a token ratio above it are dropped. null: no veto."""
    batch_normalize: bool | AsPreset = "preset"
    """Divide the weights by their mean over the whole optimiser step."""
    bypass: bool | AsPreset = "preset"
    """Take rollout_logprobs as old policy. With weights only under loss_type reinforce, which has no ratio."""
    weight_kl: bool | AsPreset = "preset"
    """Whether the weight also multiplies the KL penalty."""
    log_only: bool | AsPreset = "preset"
    """Measure the correction, change no gradient."""

    def resolve(self) -> CorrectionConfig:
        """Return the correction asked for.

        Raises:
            ValueError: an unknown preset or a contradiction; the message names the key.
        """
        overrides = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(CorrectionConfig)
            if getattr(self, field.name) != "preset"
        }
        if "rejection" in overrides:
            rules = overrides["rejection"] or []
            overrides["rejection"] = tuple(_rule(index, rule) for index, rule in enumerate(rules))
        return CorrectionConfig(**overrides) if self.preset is None else preset(self.preset, **overrides)


def _rule(index: int, rule: dict[str, Any]) -> RejectionRule:
    try:
        return RejectionRule(**rule)
    except (TypeError, ValueError) as error:
        keys = ", ".join(field.name for field in dataclasses.fields(RejectionRule))
        raise ValueError(f"correction.rejection[{index}] (keys: {keys}): {error}") from error


@dataclass(frozen=True, kw_only=True)
class DiagnosticsSettings:
    """How often the mismatch is measured in full."""

    every_n_steps: int = 1
    """Optimiser steps between two full measurements; between them only the core set is kept up (see the table of
    metrics for which is which)."""

    def __post_init__(self) -> None:
        if self.every_n_steps < 1:
            raise ValueError(f"model.diagnostics.every_n_steps={self.every_n_steps}: must be at least 1")

    def are_due(self, step: int) -> bool:
        """Whether the step after `step` optimiser steps is measured in full."""
        return step % self.every_n_steps == 0
