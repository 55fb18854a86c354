"""The training loader: samples a rollout when the last one is used up and cuts it into micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from app.data.collate import collate, split_evenly
from app.errors import LockstepError
from app.rollout.collector import Collector
from app.rollout.plan import RolloutPlan
from app.rollout.policy import Policy
from app.rollout.preparation import RowPreparation
from app.rollout.sampler import GroupSampler, PromptStream, rewards_of, zero_std
from app.rollout.steps import RolloutReport, TrainStep
from app.types import SamplingConfig, StepTotals, TrainBatch, TrainRow
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
        self.sampler = GroupSampler(collector, stream, plan, sampling, policy, world)
        self.preparation = RowPreparation(plan, policy, collector.rewards.weights, pad_token_id, world)
        self.stream = stream
        self.plan = plan
        self.policy = policy
        self.pad_token_id = pad_token_id
        self.world = world
        self._index = 0  # of the rollout in use, or the next one when none is
        self._consumed = 0  # micro-batches taken from the rollout in use
        self._rows: list[TrainRow] = []  # of the rollout in use, groups together; empty when none is
        self._totals: list[StepTotals] = []  # by optimiser step of the rollout
        self._correctable = True  # of the rollout in use, on all ranks

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
        """Position, and inside a rollout the rows of all ranks (Lightning stores rank 0's answer only).

        Inside an accumulation window the position is that of its start: the gradients so far are not saved.
        """
        used_up = self._consumed == self.plan.batches
        inside = bool(self._rows) and not used_up
        return {
            "index": self._index + used_up,
            "cursor": self.sampler.cursor,
            "consumed": self._consumed - self._consumed % self.plan.accumulate if inside else 0,
            "rows": self._everyones_rows() if inside else [],
            "settings": self._settings(),
        }

    def _everyones_rows(self) -> list[dict[str, Any]]:
        """The rows of all ranks in the order of the rollout, as a checkpoint can carry them. A collective."""
        size = self.plan.num_generations
        mine = {
            place: [dataclasses.asdict(row) for row in self._rows[i * size : (i + 1) * size]]
            for i, place in enumerate(self.plan.places(self.world))
        }
        groups = {place: rows for rank in self.world.gather(mine) for place, rows in rank.items()}
        return [row for place in sorted(groups) for row in groups[place]]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, on whatever number of processes.

        Raises:
            LockstepError: if the state was taken inside a rollout that was cut in another way.
        """
        self._index, self._consumed = state["index"], state["consumed"]
        self.sampler.cursor = state["cursor"]
        if not state["rows"]:
            self._rows = []
            return
        now, then = self._settings(), state["settings"]
        other = [key for key, value in now.items() if then.get(key) != value]
        changed = [f"{key} (then {then.get(key)}, now {now[key]})" for key in other]
        if changed:
            raise LockstepError(
                f"the checkpoint was written inside a rollout, and this has changed since: {', '.join(changed)}; set "
                f"it back, or use a checkpoint from a rollout's end"
            )
        size = self.plan.num_generations
        self._rows = [
            TrainRow(**row)
            for place in self.plan.places(self.world)
            for row in state["rows"][place * size : (place + 1) * size]
        ]
        self._count_totals()

    def _settings(self) -> dict[str, object]:
        """What the rows of a rollout depend on, by the keys of the configuration."""
        return {**self.plan.by_key(), **self.policy.row_settings}

    def _collect(self) -> RolloutReport:
        """Sample a rollout and prepare its rows."""
        started = time.perf_counter()
        samples, resampled = self.sampler.sample()
        sampled = time.perf_counter()
        prepared = self.preparation.prepare(samples, policy_version=self.policy.global_step)
        self._rows = prepared.rows
        self._count_totals()
        rewards = rewards_of(samples, self.plan.num_generations)
        return RolloutReport(
            samples=tuple(samples),
            groups=len(samples) // self.plan.num_generations,
            zero_std_groups=int(zero_std(rewards, self.plan.num_generations).sum()),
            resampled_groups=resampled,
            overlong_rows=prepared.overlong_rows,
            low_entropy_tokens=prepared.low_entropy_tokens,
            reward_penalty=prepared.reward_penalty,
            rollout_seconds=sampled - started,
            scoring_seconds=time.perf_counter() - sampled,
        )

    def _count_totals(self) -> None:
        """Find what each optimiser step holds over all ranks, and whether all of them have log-probabilities."""
        self._correctable = self.preparation.correctable(self._rows)
        everyone = self.world.gather([self._step_totals(step) for step in range(self.plan.steps)])
        self._totals = [functools.reduce(StepTotals.__add__, ranks) for ranks in zip(*everyone, strict=True)]

    def _step_totals(self, step: int) -> StepTotals:
        """What this rank's part of an optimiser step holds."""
        rows = self._step_rows(step)
        sums = None
        if self.policy.needs_step_sums:
            batch = collate(rows, pad_token_id=self.pad_token_id, correctable=self._correctable)
            sums = self.policy.step_sums(batch)
        tokens = sum(row.sampled_count for row in rows)
        return StepTotals(tokens=tokens, rows=len(rows), micro_batches=self.plan.accumulate, sums=sums)

    def _step_rows(self, step: int) -> list[TrainRow]:
        """This rank's rows of one optimiser step, sorted by length. Every pass has the same mini-batches."""
        mini_batch = step % self.plan.mini_batches
        shares = [len(share) * self.plan.num_generations for share in self.plan.shares(self.world)]
        start = sum(shares[:mini_batch])
        return sorted(self._rows[start : start + shares[mini_batch]], key=lambda row: len(row.token_ids))

    def _batch(self, index: int) -> TrainBatch:
        step, micro = divmod(index, self.plan.accumulate)
        rows = self._step_rows(step)
        return collate(
            rows[split_evenly([len(row.token_ids) for row in rows], self.plan.accumulate)[micro]],
            pad_token_id=self.pad_token_id,
            totals=self._totals[step],
            correctable=self._correctable,
            ends_rollout=index == self.plan.batches - 1,
        )
