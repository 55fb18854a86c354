"""What the loaders yield: opaque to Lightning's walkers, open to ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.types import Sample, TrainBatch


@dataclass(frozen=True, kw_only=True)
class RolloutReport:
    """What happened in one rollout on this rank, for logs."""

    samples: tuple[Sample, ...]
    """The rows that are trained on."""
    groups: int
    """How many groups `samples` holds."""
    zero_std_groups: int
    """Groups among `samples` whose rewards are all equal, before any KL penalty: they give no gradient without one."""
    resampled_groups: int
    """Groups of zero reward deviation that were replaced."""
    overlong_rows: int
    """Rows kept out of the loss because the length limit cut them."""
    low_entropy_tokens: int
    """Tokens of the other rows kept out of the loss for their low entropy."""
    reward_penalty: Tensor | None
    """[rows] what the KL penalty took from the rewards. None: nothing."""
    rollout_seconds: float
    """Seconds of sampling and rewards."""
    scoring_seconds: float
    """Seconds of old and reference log-probabilities, and of the advantages."""


class TrainStep:
    """One micro-batch on its way through Lightning.

    Not a dataclass on purpose: Lightning's walkers refuse frozen dataclasses, and DeepSpeed's precision plugin
    rounds every float tensor that it can reach to bfloat16, log-probabilities included.
    """

    __slots__ = ("batch", "report")

    def __init__(self, batch: TrainBatch, report: RolloutReport | None) -> None:
        self.batch = batch
        self.report = report
        """Set on the first micro-batch after a rollout was sampled."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TrainStep:
        """Return the step with its tensors on `device`."""
        return TrainStep(self.batch.to(device, non_blocking), self.report)


class EvalStep:
    """Validation samples on their way through Lightning (see TrainStep for why this is no dataclass)."""

    __slots__ = ("samples",)

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
