"""Settings as YAML gives them, where that is not the form the formulas want."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from app.maths.correction import CorrectionConfig, RejectionRule, preset
from app.maths.correction.config import BoundLevel, Control, Level


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """A preset and overrides. An override left at null is as the preset has it (see CorrectionConfig for each)."""

    preset: str | None = "swift/token_truncate"
    """Name of a preset of app.maths.correction.PRESETS. null: start from no correction, only measure."""
    level: Level | None = None
    """Level of the importance weight: token ratio, sequence product, geometric mean, or none."""
    bound_level: BoundLevel | None = None
    """Level at which control `mask` tests its bounds."""
    control: Control | None = None
    """truncate: clamp the weight to the bounds. mask: weight 0 outside them."""
    lower: float | None = None
    """Least ratio train / rollout."""
    upper: float | None = None
    """Largest ratio train / rollout."""
    rejection: list[dict[str, Any]] | None = None
    """Rules that drop tokens or rows, each {level, statistic, lower, upper} (see RejectionRule)."""
    veto_low: float | None = None
    """Rows with a token ratio below it are dropped."""
    veto_high: float | None = None
    """Rows with a token ratio above it are dropped."""
    batch_normalize: bool | None = None
    """Divide the weights by their mean over the whole optimiser step."""
    bypass: bool | None = None
    """Take rollout_logprobs as old policy. With weights only under loss_type reinforce, which has no ratio."""
    weight_kl: bool | None = None
    """Whether the weight also multiplies the KL penalty."""
    log_only: bool | None = None
    """Measure the correction, change no gradient."""

    def resolve(self) -> CorrectionConfig:
        """Return the correction asked for.

        Raises:
            ValueError: an unknown preset or a contradiction; the message names the key.
        """
        values = dataclasses.asdict(dataclasses.replace(self, rejection=None))
        if self.rejection is not None:
            values["rejection"] = tuple(_rule(index, rule) for index, rule in enumerate(self.rejection))
        name = values.pop("preset")
        overrides = {key: value for key, value in values.items() if value is not None}
        return CorrectionConfig(**overrides) if name is None else preset(name, **overrides)


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
