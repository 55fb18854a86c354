"""Samples the groups of a rollout, and groups for those of zero reward deviation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.maths.advantages import zero_std_groups
from app.rollout.collector import Collector, row_seed
from app.rollout.plan import RolloutPlan
from app.rollout.policy import Policy
from app.types import Prompt, Sample, SamplingConfig
from app.world import World


class GroupSampler:
    """Takes prompts from the stream, this rank's share of each rollout, and samples a group of each."""

    def __init__(
        self,
        collector: Collector,
        stream: PromptStream,
        plan: RolloutPlan,
        sampling: SamplingConfig,
        policy: Policy,
        world: World,
    ) -> None:
        self.collector = collector
        self.stream = stream
        self.plan = plan
        self.sampling = sampling
        self.policy = policy
        self.world = world
        self.cursor = 0
        """Prompts taken from the stream, over all ranks."""

    def sample(self) -> tuple[list[Sample], int]:
        """Return this rank's groups of a new rollout in the order of `RolloutPlan.places`, and how many were replaced.

        Groups of zero reward deviation are replaced: dynamic sampling (DAPO, arXiv 2503.14476) with a bound, after
        `plan.resample_zero_std` tries such a group is kept. All ranks must call it together.
        """
        group = self.plan.num_generations
        places = self.plan.places(self.world)
        samples = self._draw([self.cursor + place for place in places])
        self.cursor += self.plan.prompts_per_rollout
        resampled = 0
        for _ in range(self.plan.resample_zero_std):
            bad = zero_std(rewards_of(samples, group), group).nonzero().flatten().tolist()
            gathered = self.world.gather([places[index] for index in bad])  # every rank asks, also with none
            everyone = sorted(place for rank in gathered for place in rank)
            if not everyone:
                break
            # by place in the rollout, so that the new prompts do not depend on the number of processes
            drawn = self._draw([self.cursor + everyone.index(places[index]) for index in bad])
            self.cursor += len(everyone)
            for number, index in enumerate(bad):
                samples[index * group : (index + 1) * group] = drawn[number * group : (number + 1) * group]
            resampled += len(bad)
        return samples, resampled

    def _draw(self, positions: list[int]) -> list[Sample]:
        """Sample the prompts at these positions of the stream; a position is never drawn twice. A collective."""
        return self.collector.collect(
            [self.stream.at(position) for position in positions],
            self.sampling,
            num_generations=self.plan.num_generations,
            policy_version=self.policy.global_step,
            draws=positions,
        )


def rewards_of(samples: Sequence[Sample], group_size: int) -> list[float]:
    """The rows' rewards; a row that no function scored gets its group's mean, which moves nobody's advantage."""
    values = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = values.view(-1, group_size)
    means = groups.nanmean(dim=1, keepdim=True).nan_to_num(0.0).expand_as(groups)
    return torch.where(groups.isnan(), means, groups).flatten().tolist()


def zero_std(rewards: Sequence[float], group_size: int) -> Tensor:
    """Which groups [P] have all rewards equal."""
    return zero_std_groups(torch.tensor(rewards, dtype=torch.float64), group_size)


class PromptStream:
    """An endless walk over the prompts, shuffled anew each epoch; any position can be reached directly."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = prompts
        self.seed = seed
        self._epoch, self._order = -1, list(range(len(prompts)))

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position, from 0."""
        epoch, index = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(row_seed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(len(self.prompts), generator=generator).tolist()
        return self.prompts[self._order[index]]
