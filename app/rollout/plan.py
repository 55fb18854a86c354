"""How rollouts are sampled and cut into optimiser steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from app.errors import LockstepError
from app.maths.advantages import Scale
from app.world import World

RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How rollouts are sampled, what of them is trained on, and how they are cut into optimiser steps."""

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
    multi_objective_aggregation: RewardAggregation
    """Whether advantages come from the sum of the rewards, or each reward is normalised before the sum."""
    resample_zero_std: int
    """How often groups whose rewards are all equal are replaced by groups of new prompts."""
    mask_truncated_completions: bool
    """Whether completions that were cut by the length limit are kept out of the loss."""
    top_entropy_quantile: float
    """Share of a rollout's tokens, those of the highest entropy, that the loss may use."""

    def by_key(self) -> dict[str, object]:
        """The plan by the keys of the configuration."""
        fields = dataclasses.asdict(self)
        accumulate = fields.pop("accumulate")
        return {
            **{f"data.{name}": value for name, value in fields.items()},
            "trainer.accumulate_grad_batches": accumulate,
        }

    @property
    def steps(self) -> int:
        """Optimiser steps per rollout."""
        return self.mini_batches * self.num_iterations

    @property
    def batches(self) -> int:
        """Micro-batches per rollout."""
        return self.steps * self.accumulate

    def shares(self, world: World) -> list[list[int]]:
        """Return this rank's groups of each mini-batch, by their place in the rollout (0 to `prompts_per_rollout`).

        The mini-batches do not depend on the number of processes: each is shared out by itself.
        """
        places = torch.arange(self.prompts_per_rollout).tensor_split(self.mini_batches)
        return [world.shard(mini_batch.tolist()) for mini_batch in places]

    def places(self, world: World) -> list[int]:
        """Return this rank's groups of the whole rollout, in the order of `shares`."""
        return [place for share in self.shares(world) for place in share]

    def check(self, ranks: int) -> None:
        """Refuse a plan that leaves some micro-batch without rows.

        Raises:
            LockstepError: naming the settings to change.
        """
        fewest = self.prompts_per_rollout // self.mini_batches // ranks
        if fewest < 1:
            raise LockstepError(
                f"data.prompts_per_rollout={self.prompts_per_rollout} is too small for data.mini_batches="
                f"{self.mini_batches} on {ranks} processes: each mini-batch needs a prompt on each of them"
            )
        if fewest * self.num_generations < self.accumulate:
            raise LockstepError(
                f"trainer.accumulate_grad_batches={self.accumulate} is more than the {fewest * self.num_generations} "
                f"rows that a process has of a mini-batch: lower it, or raise data.prompts_per_rollout or "
                f"data.num_generations"
            )
