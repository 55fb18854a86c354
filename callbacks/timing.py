"""Where the time goes."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from app.rollout.steps import TrainStep
from app.training.module import GRPOModule


class Timing(Callback):
    """Feeds the module's phases: rollout and scoring from the reports, update from batch start to batch end.

    It must stand before WeightSync in the list of callbacks, or the update would include the sync.
    """

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TrainStep, batch_idx: int
    ) -> None:
        """Take in the rollout's seconds and start the clock."""
        assert isinstance(pl_module, GRPOModule)
        if batch.report is not None:
            pl_module.phases.add("rollout", batch.report.rollout_seconds)
            pl_module.phases.add("scoring", batch.report.scoring_seconds)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Stop the clock."""
        assert isinstance(pl_module, GRPOModule)
        pl_module.phases.add("update", time.perf_counter() - self._started)
        pl_module.phases.add_tokens(batch.batch.totals.tokens / trainer.accumulate_grad_batches)
