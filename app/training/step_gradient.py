"""The gradient of an optimiser step, judged before the optimiser moves the weights."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from app.distributed.gradients import Gradients
from app.errors import LockstepError
from app.guards.nonfinite import NonFiniteGuard
from app.guards.run_control import RunControl
from app.maths.objective import LossParts
from app.training.meters import StepMeters
from app.types import TrainBatch
from app.world import World


class StepGradient:
    """Measures the gradient's norm, and leaves a step out if nothing was left to train on or something is not finite.

    Args:
        gradients: where the strategy keeps them.
        guard: what decides about values that are not finite.
        run_control: what ends a run that has become hopeless.
        world: the processes that train together.
        judges_norm: False: an infinite norm is none of the guard's business, because a search for a loss scale
            (float16) expects it and skips the step itself.
    """

    def __init__(
        self, gradients: Gradients, guard: NonFiniteGuard, run_control: RunControl, world: World, *, judges_norm: bool
    ) -> None:
        self.gradients = gradients
        self.guard = guard
        self.run_control = run_control
        self.world = world
        self.judges_norm = judges_norm
        self._trained_tokens: list[Tensor] = []  # of this rank's micro-batches of the optimiser step under way

    def watch(self, batch: TrainBatch, new_logprobs: Tensor, parts: LossParts) -> None:
        """Take note of a micro-batch; `new_logprobs` [B, T] in nats."""
        self.guard.watch(batch, new_logprobs, parts.loss)
        self._trained_tokens.append(parts.trained_tokens)

    def judge(self, step: int, learning_rate: float, meters: StepMeters) -> None:
        """Decide, for all ranks together, whether optimiser step `step` (from 1) may move the weights."""
        if not self.gradients.complete():
            return
        trained, self._trained_tokens = torch.stack(self._trained_tokens).sum(), []
        norm = self.gradients.norm()
        try:
            non_finite = self.guard.close_step(norm if self.judges_norm else None, step)
        except LockstepError as error:  # the run ends saved: replaying its rows takes a checkpoint
            non_finite = True
            self.run_control.ask_to_stop(error)
        nothing_left = not self.world.sum(trained).item()
        if self.world.rank == 0:  # all ranks have the same values
            meters.optimiser_step(norm, learning_rate, nothing_left, non_finite)
        if nothing_left or non_finite:
            self.gradients.discard()
        if nothing_left:
            rank_zero_warn(
                f"optimiser step {step}: every token was rejected or filtered out, the weights stay as they are; the "
                f"dashboard's `dropped data` says by what, widen its bounds (app/README.md)"
            )
