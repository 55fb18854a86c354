"""What the loader knows of the trained model: scores of rows, by the policy and by the frozen reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from transformers import PreTrainedModel

from app.data.collate import collate, row_to_score, sampled_values
from app.maths.objective import reward_kl_penalty
from app.policy.loading import MIXED_PRECISION
from app.policy.lora import adapters_off
from app.policy.scoring import sampled_logprobs
from app.rollout.policy import Scores
from app.training.step_correction import StepCorrection
from app.types import StepSums, TrainBatch
from app.world import World


class RowScorer:
    """Scores rows with the policy as it is now, and with the reference (the `Policy` of `app.rollout.policy`).

    It is made before the models are loaded; `attach` and `attach_reference` hand it over what it scores with.

    Args:
        step_correction: what decides which scores rows need.
        temperature: divides the logits, as in sampling.
        micro_batch_tokens: most padded tokens of one forward pass; None: no limit.
        world: the processes that train together.
    """

    policy: PreTrainedModel

    def __init__(
        self, step_correction: StepCorrection, *, temperature: float, micro_batch_tokens: int | None, world: World
    ) -> None:
        self.step_correction = step_correction
        self.temperature = temperature
        self.micro_batch_tokens = micro_batch_tokens
        self.world = world
        self.reference: PreTrainedModel | None = None
        """The frozen model of the KL penalty; the policy itself, its adapters off, under LoRA. None: no penalty."""
        self._trainer: Any = None

    def attach(self, policy: PreTrainedModel, trainer: Any) -> None:
        """Score with `policy`, as `trainer` runs it: its device, its precision, its strategy."""
        self.policy, self._trainer = policy, trainer

    def attach_reference(self, reference: PreTrainedModel) -> None:
        """Score with `reference` too, and freeze it unless it is the policy."""
        self.reference = reference if reference is self.policy else reference.requires_grad_(False)

    def place_reference(self, device: torch.device) -> None:
        """Move the reference to the policy's device; under DeepSpeed, which casts the policy, to its dtype too.

        In another precision the KL penalty would not start from 0.
        """
        if self.reference is not None and self.reference is not self.policy:
            zero = isinstance(self._trainer.strategy, DeepSpeedStrategy)
            dtype = self.policy.dtype if zero else self.reference.dtype
            self.reference.to(device, dtype)  # type: ignore[arg-type, call-overload]

    @property
    def global_step(self) -> int:
        """Optimiser steps done: the version of the trainer's weights."""
        return self._trainer.global_step

    @property
    def has_reference(self) -> bool:
        """Whether rollouts are scored by a frozen reference."""
        return self.reference is not None

    @property
    def bypass(self) -> bool:
        """Whether the rollout's log-probabilities stand in for the old ones."""
        return self.step_correction.run_control.correction.bypass

    @property
    def needs_step_sums(self) -> bool:
        """Whether a micro-batch needs sums over its whole optimiser step."""
        return self.step_correction.run_control.needs_step_sums

    @property
    def row_settings(self) -> dict[str, object]:
        """Settings that decide what rows are scored for, by their keys."""
        return {
            "model.correction.bypass": self.bypass,
            "model.loss.kl_in_reward": self.step_correction.loss.kl_in_reward,
            "a KL penalty (model.loss.beta above 0)": self.has_reference,
            "sums over a step (batch_normalize or denominator=kept)": self.needs_step_sums,
        }

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype the policy computes in: the autocast one under mixed precision, else its parameters'."""
        mixed = MIXED_PRECISION.get(str(self._trainer.precision))
        return self.policy.dtype if mixed is None else getattr(torch, mixed)

    def step_sums(self, batch: TrainBatch) -> StepSums:
        """Return the sums over rows that other micro-batches of the step need."""
        return self.step_correction.step_sums(batch)

    def logprobs(
        self,
        batch: TrainBatch,
        *,
        policy: PreTrainedModel | None = None,
        temperature: float | None = None,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [B, T] of the sampled tokens; see `sampled_logprobs`.

        Args:
            batch: the rows, on the model's device.
            policy: the model to score with; None: the policy, with gradient where it is enabled.
            temperature: divides the logits; None: that of training.
            with_entropy: whether entropies are computed; zeros otherwise.
        """
        strategy = self._trainer.strategy
        in_step = isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3  # each call gathers weights
        return sampled_logprobs(
            self.policy if policy is None else policy,
            batch,
            temperature=self.temperature if temperature is None else temperature,
            max_tokens=self.micro_batch_tokens,
            with_entropy=with_entropy,
            in_step=self.world if in_step else None,
        )

    @torch.no_grad()
    def score(self, batch: TrainBatch, *, old: bool, entropy: bool) -> Scores:
        """Return what rows, on the host, need of the policy and the reference; also on the host."""
        batch = batch.to(self._trainer.strategy.root_device)
        loss = self.step_correction.loss
        with_penalty = self.has_reference and loss.kl_in_reward
        policy = entropies = reference = penalty = None
        with self._trainer.precision_plugin.forward_context():
            if old or with_penalty or entropy:
                policy, entropies = self.logprobs(batch, with_entropy=entropy)
            if self.reference is not None:
                with adapters_off(self.reference):
                    reference, _ = self.logprobs(batch, policy=self.reference)
        if with_penalty:
            assert policy is not None
            assert reference is not None
            penalty = reward_kl_penalty(policy, reference, batch.mask, loss).cpu()
        return Scores(
            old=policy.cpu() if policy is not None and old else None,
            ref=None if reference is None else reference.cpu(),
            entropy=entropies.cpu() if entropies is not None and entropy else None,
            reward_penalty=penalty,
        )

    @torch.no_grad()
    def score_completions(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """Return the policy's log-probabilities of completions at temperature 1, for the canary of a weight sync.

        Args:
            rows: (prompt ids, completion ids) of each row.
        """
        batch = collate([row_to_score(prompt, ids) for prompt, ids in rows], pad_token_id=0)
        batch = batch.to(self._trainer.strategy.root_device)
        with self._trainer.precision_plugin.forward_context():
            logprobs, _ = self.logprobs(batch, temperature=1.0)
        return sampled_values(logprobs, batch, range(len(rows)))
