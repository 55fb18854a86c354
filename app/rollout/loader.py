"""The training loader: samples a rollout when the last one is used up and cuts it into micro-batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from app.data.collate import collate, split_evenly
from app.errors import LockstepError
from app.maths.advantages import group_advantages, spreadless_groups
from app.rollout.collector import Collector, row_seed
from app.rollout.plan import Policy, RolloutPlan
from app.rollout.steps import RolloutReport, TrainStep
from app.rollout.stream import PromptStream
from app.types import Sample, SamplingConfig, TrainBatch, TrainRow
from app.world import World


class RolloutLoader:
    """Yields TrainSteps, sampling a new rollout whenever the last one is used up.

    It is sized, because Lightning prefetches from an unsized iterable and each rollout would then be sampled
    before the last update; and stateful, because a run must resume exactly, also inside a rollout.
    """

    def __init__(
        self,
        collector: Collector,
        stream: PromptStream,
        plan: RolloutPlan,
        sampling: SamplingConfig,
        policy: Policy,
        pad_token_id: int,
        world: World,
    ) -> None:
        self.collector = collector
        self.stream = stream
        self.plan = plan
        self.sampling = sampling
        self.policy = policy
        self.pad_token_id = pad_token_id
        self.world = world
        self._index = 0  # of the rollout in use, or the next one when none is
        self._cursor = 0  # prompts taken from the stream, over all ranks
        self._consumed = 0  # micro-batches taken from the rollout in use
        self._rows: list[TrainRow] = []  # of the rollout in use, groups together; empty when none is
        self._policy_version = -1
        self._totals: list[tuple[int, int]] = []  # (tokens, rows) over all ranks, by optimiser step of the rollout

    def __len__(self) -> int:
        """Micro-batches of an epoch: rollouts that take each prompt at least once."""
        return -(-len(self.stream.prompts) // self.plan.prompts_per_rollout) * self.plan.batches

    def __iter__(self) -> Iterator[TrainStep]:
        """Yield the rest of the epoch."""
        if self._consumed == self.plan.batches:  # Lightning takes the promised number and never asks for the end
            self._next_rollout()
        rollouts = len(self) // self.plan.batches
        while True:
            report = None
            if not self._rows:
                report = self._collect()
            while self._consumed < self.plan.batches:
                batch = self._batch(self._consumed)
                self._consumed += 1  # before the yield: a checkpoint written after the step must not repeat it
                yield TrainStep(batch, report)
                report = None
            self._next_rollout()
            if self._index % rollouts == 0:
                return

    def _next_rollout(self) -> None:
        self._index, self._consumed, self._rows = self._index + 1, 0, []

    def state_dict(self) -> dict[str, Any]:
        """Position, and inside a rollout the rows of every rank (Lightning stores rank 0's answer only)."""
        inside = 0 < self._consumed < self.plan.batches
        used_up = self._consumed == self.plan.batches
        rows = self.world.gather([dataclasses.asdict(row) for row in self._rows]) if inside else []
        return {
            "index": self._index + used_up,
            "cursor": self._cursor,
            "consumed": self._consumed if inside else 0,
            "policy_version": self._policy_version,
            "rows": rows,
            "plan": dataclasses.asdict(self.plan),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            LockstepError: if the state was taken inside a rollout that was cut or sharded in another way.
        """
        self._index, self._cursor, self._consumed = state["index"], state["cursor"], state["consumed"]
        self._policy_version = state["policy_version"]
        if not state["rows"]:
            self._rows = []
            return
        if len(state["rows"]) != self.world.size:
            raise LockstepError(
                f"the checkpoint was written inside a rollout by {len(state['rows'])} processes and cannot go on with "
                f"{self.world.size}: use as many, or a checkpoint from a rollout's end"
            )
        changed = [key for key, value in dataclasses.asdict(self.plan).items() if state["plan"][key] != value]
        if changed:
            raise LockstepError(
                f"the checkpoint was written inside a rollout, and {', '.join(changed)} has changed: set it back, "
                f"or use a checkpoint from a rollout's end"
            )
        self._rows = [TrainRow(**row) for row in state["rows"][self.world.rank]]
        self._count_totals()

    def _collect(self) -> RolloutReport:
        started = time.perf_counter()
        samples, resampled = self._sample()
        self._policy_version = self.policy.global_step
        rewards = self._rewards(samples)
        advantages = self._advantages(rewards)
        self._rows = [
            TrainRow(
                prompt_ids=sample.prompt.token_ids,
                completion_ids=sample.completion.token_ids,
                rollout_logprobs=sample.completion.logprobs,
                advantage=advantage,
                reward=reward,
            )
            for sample, reward, advantage in zip(samples, rewards, advantages, strict=True)
        ]
        sampled = time.perf_counter()
        self._score()
        self._count_totals()
        return RolloutReport(
            samples=tuple(samples),
            groups=len(samples) // self.plan.num_generations,
            spreadless_groups=int(self._spreadless(rewards).sum()),
            resampled_groups=resampled,
            rollout_seconds=sampled - started,
            scoring_seconds=time.perf_counter() - sampled,
        )

    def _sample(self) -> tuple[list[Sample], int]:
        """Sample this rank's groups; those without spread are replaced as often as the plan allows."""
        group = self.plan.num_generations
        everyone = list(range(self._cursor, self._cursor + self.plan.prompts_per_rollout))
        self._cursor += self.plan.prompts_per_rollout
        samples = self._draw(self.world.shard(everyone))
        resampled = 0
        for _ in range(self.plan.resample_spreadless):
            bad = self._spreadless(self._rewards(samples)).nonzero().flatten().tolist()
            needs = self.world.gather(len(bad))  # every rank asks, also with nothing to replace
            if not sum(needs):
                break
            first = self._cursor + sum(needs[: self.world.rank])
            drawn = self._draw(list(range(first, first + len(bad))))
            self._cursor += sum(needs)
            for place, index in enumerate(bad):
                samples[index * group : (index + 1) * group] = drawn[place * group : (place + 1) * group]
            resampled += len(bad)
        return samples, resampled

    def _draw(self, positions: list[int]) -> list[Sample]:
        """Sample the prompts at these positions of the stream; a position is never drawn twice."""
        if not positions:
            return []
        return self.collector.collect(
            [self.stream.at(position) for position in positions],
            self.sampling,
            num_generations=self.plan.num_generations,
            policy_version=self.policy.global_step,
            draws=positions,
        )

    def _rewards(self, samples: Sequence[Sample]) -> list[float]:
        """The rows' rewards; a row that no function scored gets its group's mean, and so the advantage 0."""
        values = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        groups = values.view(-1, self.plan.num_generations)
        means = groups.nanmean(dim=1, keepdim=True).nan_to_num(0.0).expand_as(groups)
        return torch.where(groups.isnan(), means, groups).flatten().tolist()

    def _spreadless(self, rewards: list[float]) -> Tensor:
        return spreadless_groups(torch.tensor(rewards, dtype=torch.float64), self.plan.num_generations)

    def _advantages(self, rewards: list[float]) -> list[float]:
        """Advantages of this rank's rows; the batch's standard deviation is that of all ranks."""
        everyone = self.world.gather(rewards)
        values = group_advantages(
            torch.tensor([reward for rank in everyone for reward in rank], dtype=torch.float64),
            self.plan.num_generations,
            scale=self.plan.scale_rewards,
            leave_one_out=self.plan.leave_one_out,
        )
        start = sum(len(rank) for rank in everyone[: self.world.rank])
        return values[start : start + len(rewards)].tolist()

    def _score(self) -> None:
        """Fill in old and reference log-probabilities, in one pass over rows sorted by length.

        Old ones are needed by several optimiser steps only: inside one step the weights do not change, and the
        training step's own log-probabilities are the old ones.
        """
        if self.plan.steps == 1 and not self.policy.has_reference:
            return
        order = sorted(range(len(self._rows)), key=lambda i: self._rows[i].tokens)
        batch = collate(
            [self._rows[i] for i in order],
            pad_token_id=self.pad_token_id,
            total_tokens=0,
            total_rows=0,
            policy_version=self._policy_version,
            ends_rollout=False,
        )
        old, ref = self.policy.score(batch, old=self.plan.steps > 1)
        for place, i in enumerate(order):
            length = len(self._rows[i].completion_ids)
            self._rows[i] = dataclasses.replace(
                self._rows[i],
                old_logprobs=None if old is None else tuple(old[place, :length].tolist()),
                ref_logprobs=None if ref is None else tuple(ref[place, :length].tolist()),
            )

    def _count_totals(self) -> None:
        """Count tokens and rows of each optimiser step over all ranks: the denominators of the loss."""
        mine = []
        for step in range(self.plan.steps):
            rows = self._step_rows(step)
            mine.append((sum(len(row.completion_ids) for row in rows), len(rows)))
        everyone = self.world.gather(mine)
        self._totals = [(sum(t for t, _ in step), sum(r for _, r in step)) for step in zip(*everyone, strict=True)]

    def _step_rows(self, step: int) -> list[TrainRow]:
        """This rank's rows of one optimiser step, sorted by length; groups stay whole, their order changes by pass."""
        iteration, mini_batch = divmod(step, self.plan.mini_batches)
        size = self.plan.num_generations
        groups = len(self._rows) // size
        generator = torch.Generator().manual_seed(row_seed(self.stream.seed, self._index, iteration))
        chosen = torch.randperm(groups, generator=generator).tensor_split(self.plan.mini_batches)[mini_batch]
        rows = [row for group in chosen.tolist() for row in self._rows[group * size : (group + 1) * size]]
        return sorted(rows, key=lambda row: row.tokens)

    def _batch(self, index: int) -> TrainBatch:
        step, micro = divmod(index, self.plan.accumulate)
        rows = self._step_rows(step)
        total_tokens, total_rows = self._totals[step]
        return collate(
            rows[split_evenly([row.tokens for row in rows], self.plan.accumulate)[micro]],
            pad_token_id=self.pad_token_id,
            total_tokens=total_tokens,
            total_rows=total_rows,
            policy_version=self._policy_version,
            ends_rollout=index == self.plan.batches - 1,
        )
