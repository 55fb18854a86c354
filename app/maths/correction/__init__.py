"""Rollout correction: importance weights, rejection and veto of the mismatch between engine and trainer."""

from app.maths.correction.compute import Correction, correct, mean_weight, weight_sums
from app.maths.correction.config import CorrectionConfig, RejectionRule
from app.maths.correction.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Correction",
    "CorrectionConfig",
    "RejectionRule",
    "correct",
    "mean_weight",
    "preset",
    "weight_sums",
]
