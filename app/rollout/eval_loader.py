"""Samples of the validation prompts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.rollout.collector import Collector
from app.rollout.policy import Policy
from app.rollout.steps import EvalStep
from app.types import Prompt, Sample, SamplingConfig
from app.world import World


class EvalLoader:
    """Yields EvalSteps: samples of this rank's share of the validation prompts."""

    def __init__(
        self,
        collector: Collector,
        prompts: list[Prompt],
        sampling: SamplingConfig,
        policy: Policy,
        world: World,
        batch_size: int,
    ) -> None:
        self.collector = collector
        self.prompts = world.shard(prompts)
        self.sampling = sampling
        self.policy = policy
        # every rank yields as many steps, or the ranks would part in the middle of validation
        self.length = max(1, -(-len(prompts) // (world.size * batch_size)))

    def __len__(self) -> int:
        """Steps of a validation run, equal on every rank."""
        return self.length

    def __iter__(self) -> Iterator[EvalStep]:
        """Sample and yield, one engine call a step."""
        for part in torch.arange(len(self.prompts)).tensor_split(self.length):
            prompts = [self.prompts[i] for i in part.tolist()]
            yield EvalStep(self._sample(prompts))  # all ranks together, also those without prompts

    def _sample(self, prompts: list[Prompt]) -> list[Sample]:
        return self.collector.collect(
            prompts,
            self.sampling,
            num_generations=1,
            policy_version=self.policy.global_step,
            draws=[-1 - prompt.row for prompt in prompts],  # apart from the positions of training
        )
