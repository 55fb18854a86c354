"""How rollouts are cut into optimiser steps, and what a loader must know of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.errors import LockstepError
from app.maths.advantages import Scale
from app.types import TrainBatch


class Policy(Protocol):
    """What a loader must know of the trained model."""

    global_step: int
    """Optimiser steps done: the version of the trainer's weights."""

    has_reference: bool
    """Whether rollouts are scored by a frozen reference."""

    def score(self, batch: TrainBatch, old: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return old log-probabilities (if asked and needed) and reference log-probabilities, each [B, T] or None."""


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How rollouts are sampled and cut into optimiser steps."""

    prompts_per_rollout: int
    """Prompts of one rollout, over all ranks."""
    num_generations: int
    """Completions per prompt (the group)."""
    mini_batches: int
    """Optimiser steps of one pass over a rollout."""
    num_iterations: int
    """Passes over a rollout."""
    accumulate: int
    """Micro-batches of one optimiser step."""
    scale_rewards: Scale
    """Which standard deviation divides the advantages."""
    leave_one_out: bool
    """Whether the baseline of a row leaves the row itself out."""
    resample_spreadless: int
    """How often groups whose rewards are all equal are replaced by groups of new prompts."""

    @property
    def steps(self) -> int:
        """Optimiser steps per rollout."""
        return self.mini_batches * self.num_iterations

    @property
    def batches(self) -> int:
        """Micro-batches per rollout."""
        return self.steps * self.accumulate

    def check(self, ranks: int) -> None:
        """Refuse a plan that leaves some micro-batch without rows.

        Raises:
            LockstepError: naming the settings to change.
        """
        fewest = self.prompts_per_rollout // ranks // self.mini_batches
        if fewest < 1:
            raise LockstepError(
                f"data.prompts_per_rollout={self.prompts_per_rollout} is too small for data.mini_batches="
                f"{self.mini_batches} on {ranks} processes: each mini-batch needs a prompt on each of them"
            )
        if fewest * self.num_generations < self.accumulate:
            raise LockstepError(
                f"trainer.accumulate_grad_batches={self.accumulate} is more than the {fewest * self.num_generations} "
                f"rows of a mini-batch: lower it, or raise data.prompts_per_rollout or data.num_generations"
            )
