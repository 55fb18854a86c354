"""A progress bar that counts optimiser steps over the whole run."""

from __future__ import annotations

import math
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm

from app.rollout.steps import TrainStep


class StepProgress(ProgressBar):
    """Steps done and to do, time left, samples so far, reward, mismatch and tokens per second.

    Lightning's own bars count micro-batches of an epoch, which says nothing about a run measured in `max_steps`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._train: tqdm[Any] | None = None
        self._evaluation: tqdm[Any] | None = None
        self._samples = 0

    def enable(self) -> None:
        """Show the bar (rank 0)."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar (other ranks)."""
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar at the step the run starts or goes on from."""
        total = trainer.estimated_stepping_batches
        self._train = self._bar("train", int(total) if math.isfinite(total) else None, trainer.global_step, "step")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TrainStep, batch_idx: int
    ) -> None:
        """Count the samples of a new rollout, and show what was logged since the last step."""
        if batch.report is not None:
            self._samples += len(batch.report.samples) * trainer.world_size
        self._show(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Advance when an optimiser step is done."""
        if self._train is not None:
            self._train.update(trainer.global_step - self._train.n)

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._train is not None:
            metrics = self.get_metrics(trainer, pl_module)
            shown = {"samples": self._samples, **{name: metrics[name] for name in metrics if name != "v_num"}}
            self._train.set_postfix(shown, refresh=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the finished bar on the screen."""
        if self._train is not None:
            self._show(trainer, pl_module)
            self._train.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open a bar for the validation prompts."""
        total = int(sum(trainer.num_val_batches))
        self._evaluation = self._bar("validate", total, 0, "batch", leave=trainer.state.fn != TrainerFn.FITTING)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Advance."""
        if self._evaluation is not None:
            self._evaluation.update(1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the validation bar."""
        if self._evaluation is not None:
            self._evaluation.close()

    def _bar(self, name: str, total: int | None, done: int, unit: str, leave: bool = True) -> tqdm[Any]:
        return tqdm(
            desc=name,
            total=total,
            initial=done,
            unit=unit,
            leave=leave,
            disable=not self._enabled,
            dynamic_ncols=True,
            file=sys.stdout,
        )
