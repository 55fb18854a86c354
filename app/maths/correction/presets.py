"""Named corrections: what other trainers do, in this project's terms."""

import dataclasses
from typing import Any

from app.maths.correction.config import CorrectionConfig, RejectionRule

_GEOMETRIC = RejectionRule(level="geometric", lower=0.999, upper=1.001)
_K3 = RejectionRule(level="geometric", statistic="k3", upper=0.01)

# verl states its rejection bounds on rollout / train. [0.5, 2] is the same on train / rollout; [0.999, 1.001] becomes
# [1/1.001, 1/0.999], 1e-6 away from the round numbers above, and exactly this in the bypass presets.
_BYPASS_GEOMETRIC = RejectionRule(level="geometric", lower=1 / 1.001, upper=1 / 0.999)

PRESETS: dict[str, CorrectionConfig] = {
    "swift/token_truncate": CorrectionConfig(level="token", control="truncate", upper=2.0),
    "swift/token_mask": CorrectionConfig(level="token", control="mask", upper=2.0),
    "swift/sequence_truncate": CorrectionConfig(level="geometric", control="truncate", upper=2.0),
    "swift/sequence_mask": CorrectionConfig(level="token", bound_level="geometric", control="mask", upper=2.0),
    "verl/token_is": CorrectionConfig(level="token", control="truncate", upper=2.0),
    "verl/seq_is": CorrectionConfig(level="sequence", control="truncate", upper=2.0),
    "verl/token_icepop": CorrectionConfig(level="token", control="mask", lower=0.5, upper=5.0),
    "verl/seq_is_rs": CorrectionConfig(
        level="sequence",
        control="truncate",
        upper=2.0,
        rejection=(RejectionRule(level="sequence", lower=0.5, upper=2.0),),
    ),
    "verl/geo_rs": CorrectionConfig(rejection=(_GEOMETRIC,)),
    "verl/geo_rs_token_is": CorrectionConfig(level="token", control="truncate", upper=2.0, rejection=(_GEOMETRIC,)),
    "verl/k3_rs": CorrectionConfig(rejection=(_K3,)),
    # For a loss_type with PPO's clip (dapo, grpo, ...), whose ratio is then new / rollout; the first is verl's
    # bypass_ppo_clip.
    "verl/bypass": CorrectionConfig(bypass=True),
    "verl/bypass_ppo_clip_geo_rs": CorrectionConfig(bypass=True, rejection=(_BYPASS_GEOMETRIC,)),
    "verl/bypass_ppo_clip_k3_rs": CorrectionConfig(bypass=True, rejection=(_K3,)),
    # For loss_type 'reinforce', which has no ratio: the weights are new / rollout.
    "verl/bypass_pg_is": CorrectionConfig(bypass=True, level="sequence", upper=2.0),
    "verl/bypass_pg_geo_rs": CorrectionConfig(bypass=True, rejection=(_BYPASS_GEOMETRIC,)),
    "verl/bypass_pg_geo_rs_seq_tis": CorrectionConfig(
        bypass=True, level="sequence", upper=2.0, rejection=(_BYPASS_GEOMETRIC,)
    ),
    "verl/bypass_pg_geo_rs_token_tis": CorrectionConfig(
        bypass=True, level="token", upper=2.0, rejection=(_BYPASS_GEOMETRIC,)
    ),
    "trl/sequence_mask": CorrectionConfig(level="sequence", control="mask", upper=3.0),
    "nemo/seq_mask_tis": CorrectionConfig(
        level="token", bound_level="geometric", control="mask", lower=0.999, upper=1.002
    ),
}
"""Preset name -> configuration. The part before the slash names the trainer whose arithmetic it equals. Those with
`bypass_pg` want the loss type 'reinforce', those with `bypass_ppo_clip` one of PPO's clip."""


def preset(name: str, **overrides: Any) -> CorrectionConfig:
    """Return a preset, with fields of CorrectionConfig replaced by `overrides`.

    Raises:
        ValueError: an unknown preset or field (the message lists the choices), or a contradiction after replacing.
    """
    if name not in PRESETS:
        raise ValueError(f"correction.preset={name!r} is unknown; choose one of {', '.join(PRESETS)}.")
    fields = [field.name for field in dataclasses.fields(CorrectionConfig)]
    for key in overrides:
        if key not in fields:
            raise ValueError(f"correction.{key} is unknown; choose from {', '.join(fields)}.")
    return dataclasses.replace(PRESETS[name], **overrides)
