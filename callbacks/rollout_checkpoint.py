"""Checkpoints that fall between rollouts."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from app.rollout.steps import TrainStep


class RolloutCheckpoint(ModelCheckpoint):
    """Saves at the first rollout end `every_n_train_steps` after the last save, and at the last step of the run.

    A checkpoint inside a rollout must carry the rows of every rank; between rollouts it needs none. The last step is
    saved in `on_train_batch_end` too: later hooks count the epoch as done and the run could not go on inside it.
    """

    def __init__(
        self, dirpath: str | None = None, every_n_train_steps: int = 50, save_top_k: Literal[-1, 0, 1] = 1
    ) -> None:
        """Configure the saves.

        Args:
            dirpath: folder of the checkpoints; null: `checkpoints` in the run folder.
            every_n_train_steps: least number of optimiser steps between two saves.
            save_top_k: 1 keeps the newest checkpoint only, -1 keeps all, 0 saves nothing.
        """
        super().__init__(
            dirpath=dirpath,
            filename="{step}",
            every_n_train_steps=every_n_train_steps,
            save_top_k=save_top_k,
            save_last="link" if save_top_k else None,
            enable_version_counter=False,
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Save when it is time."""
        step = trainer.global_step
        due = batch.batch.ends_rollout and step - self._last_global_step_saved >= self._every_n_train_steps
        ends = step == trainer.max_steps or trainer.should_stop
        if (due or ends) and step != self._last_global_step_saved:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of a run that is limited by `max_epochs` or stopped by a validation."""
        ends = trainer.current_epoch + 1 == trainer.max_epochs or trainer.should_stop
        if ends and trainer.global_step != self._last_global_step_saved:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)
