"""From sampled groups to rows to train on: scores of the trainer's models, advantages, and what the loss may use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.data.collate import collate
from app.maths.advantages import decoupled_advantages, group_advantages
from app.maths.entropy_mask import top_entropy_threshold
from app.rollout.plan import RolloutPlan
from app.rollout.policy import Policy, Scores
from app.rollout.sampler import rewards_of
from app.types import Sample, TrainRow
from app.world import World


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """The rows of one rollout on this rank."""

    rows: list[TrainRow]
    """In the order of the samples, groups together."""
    overlong_rows: int
    """Rows kept out of the loss because the length limit cut them."""
    low_entropy_tokens: int
    """Tokens of the other rows kept out of the loss for their low entropy."""
    reward_penalty: Tensor | None
    """[rows] what the KL penalty took from the rewards. None: nothing."""


class RowPreparation:
    """Scores the samples of a rollout and decides what each row is worth."""

    def __init__(
        self, plan: RolloutPlan, policy: Policy, reward_weights: Sequence[float], pad_token_id: int, world: World
    ) -> None:
        self.plan = plan
        self.policy = policy
        self.reward_weights = tuple(reward_weights)
        self.pad_token_id = pad_token_id
        self.world = world

    def prepare(self, samples: Sequence[Sample], policy_version: int) -> PreparedRows:
        """Return the rows of `samples`. All ranks must call it together.

        Args:
            samples: of this rank, groups together.
            policy_version: `global_step` of the weights that sampled them.
        """
        rows = [
            TrainRow.of_completion(
                sample.prompt.token_ids,
                sample.completion.token_ids,
                policy_version=policy_version,
                rollout_logprobs=sample.completion.logprobs,
                advantage=0.0,
                reward=sample.reward,
            )
            for sample in samples
        ]
        scores = self._score(rows)
        penalty = scores.reward_penalty
        advantages = self._advantages(samples, penalty)
        loss_masks, overlong, low = self._loss_masks(samples, scores.entropy)
        rows = [
            dataclasses.replace(
                row,
                advantage=advantages[i],
                old_logprobs=_tokens(scores.old, i, row),
                ref_logprobs=_tokens(scores.ref, i, row),
                loss_mask=loss_masks[i],
            )
            for i, row in enumerate(rows)
        ]
        return PreparedRows(rows=rows, overlong_rows=overlong, low_entropy_tokens=low, reward_penalty=penalty)

    def correctable(self, rows: Sequence[TrainRow]) -> bool:
        """Whether all rows of all ranks have rollout log-probabilities. All ranks must call it together."""
        return all(self.world.gather(all(row.rollout_logprobs is not None for row in rows)))

    def _score(self, rows: Sequence[TrainRow]) -> Scores:
        """Score the rows, in one pass over them sorted by length; the results are in the order of `rows`.

        Old log-probabilities are needed by several optimiser steps, or by sums over a whole one: inside one step the
        weights do not change, and the training step's own log-probabilities are the old ones. Under bypass the
        rollout's stand in for them, if they are there.
        """
        bypass = self.policy.bypass and self.correctable(rows)
        old = (self.plan.steps > 1 and not bypass) or self.policy.needs_step_sums
        entropy = self.plan.top_entropy_quantile < 1
        if not (old or entropy or self.policy.has_reference):
            return Scores()
        order = torch.tensor(sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids)))
        batch = collate([rows[i] for i in order.tolist()], pad_token_id=self.pad_token_id)
        scores = self.policy.score(batch, old=old, entropy=entropy)
        back = order.argsort()
        return Scores(**{name: None if value is None else value[back] for name, value in vars(scores).items()})

    def _advantages(self, samples: Sequence[Sample], penalty: Tensor | None) -> list[float]:
        """Advantages of this rank's rows; whatever is taken over the batch is that of all ranks.

        A row that no reward function applied to gets 0: it neither earned nor lost anything.
        """
        group = self.plan.num_generations
        if self.plan.multi_objective_aggregation == "normalize_then_sum":
            by_function = [[math.nan if v is None else v for v in sample.rewards.values()] for sample in samples]
            everyone, start = self._of_all_ranks(torch.tensor(by_function, dtype=torch.float64))
            weights = torch.tensor(self.reward_weights, dtype=torch.float64)
            values = decoupled_advantages(everyone, weights, group)
        else:
            rewards = torch.tensor(rewards_of(samples, group), dtype=torch.float64)
            everyone, start = self._of_all_ranks(rewards if penalty is None else rewards - penalty)
            values = group_advantages(
                everyone, group, scale=self.plan.scale_rewards, leave_one_out=self.plan.leave_one_out
            )
        mine = values[start : start + len(samples)].tolist()
        return [0.0 if math.isnan(sample.reward) else value for sample, value in zip(samples, mine, strict=True)]

    def _of_all_ranks(self, mine: Tensor) -> tuple[Tensor, int]:
        """Every rank's values one after another, and where this rank's begin."""
        everyone = self.world.gather(mine)
        return torch.cat(everyone), sum(len(rank) for rank in everyone[: self.world.rank])

    def _loss_masks(
        self, samples: Sequence[Sample], entropy: Tensor | None
    ) -> tuple[list[tuple[bool, ...] | None], int, int]:
        """Which tokens of each row the loss may use (None: all), and how many rows and tokens that leaves out.

        The entropies are compared with those of the whole rollout on all ranks, so that no cut of it changes which
        tokens are trained on; rows filtered out for their length do not count among them (as TRL has it).
        """
        filters_overlong = self.plan.mask_truncated_completions
        overlong = [filters_overlong and sample.completion.finish_reason == "length" for sample in samples]
        lengths = [len(sample.completion.token_ids) for sample in samples]
        if entropy is None:
            return [(False,) * n if cut else None for n, cut in zip(lengths, overlong, strict=True)], sum(overlong), 0
        usable = [row[:n] for row, n, cut in zip(entropy, lengths, overlong, strict=True) if not cut]
        everyone, _ = self._of_all_ranks(torch.cat(usable) if usable else entropy.new_empty(0))
        high = entropy >= top_entropy_threshold(everyone, self.plan.top_entropy_quantile)
        masks: list[tuple[bool, ...] | None] = []
        low = 0
        for row, n, cut in zip(high, lengths, overlong, strict=True):
            masks.append((False,) * n if cut else tuple(row[:n].tolist()))
            low += 0 if cut else n - int(row[:n].sum())
        return masks, sum(overlong), low


def _tokens(values: Tensor | None, index: int, row: TrainRow) -> tuple[float, ...] | None:
    """The values of the sampled tokens of a row out of [B, T]."""
    return None if values is None else tuple(values[index, : row.sampled_count].tolist())
