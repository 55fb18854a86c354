"""What a loader must know of the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.types import StepSums, TrainBatch


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the trainer's models say of rows, on the host. None: not asked for, or not needed."""

    old: Tensor | None = None
    """[B, T] log-probabilities of the policy, nats."""
    ref: Tensor | None = None
    """[B, T] log-probabilities of the frozen reference, nats."""
    entropy: Tensor | None = None
    """[B, T] entropy of the policy's distribution that each token was drawn from, nats."""
    reward_penalty: Tensor | None = None
    """[B] what the KL penalty takes from the rewards."""


class Policy(Protocol):
    """What a loader must know of the trained model."""

    global_step: int
    """Optimiser steps done: the version of the trainer's weights."""

    has_reference: bool
    """Whether rollouts are scored by a frozen reference."""

    bypass: bool
    """Whether the rollout's log-probabilities stand in for the old ones."""

    needs_step_sums: bool
    """Whether a micro-batch needs `step_sums` of its whole optimiser step; they need old log-probabilities."""

    row_settings: Mapping[str, object]
    """Settings, by their keys, that decide what rows are scored for: they must not change inside a rollout."""

    def score(self, batch: TrainBatch, *, old: bool, entropy: bool) -> Scores:
        """Return old log-probabilities and entropies if asked, and whatever the reference is for."""

    def step_sums(self, batch: TrainBatch) -> StepSums:
        """Return sums over the rows of `batch` that micro-batches of the same optimiser step need."""
