"""Steers the bound of the correction to an effective sample size or a clipped share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from app.dashboard.row_table import append_csv
from app.errors import LockstepError
from app.guards.threshold import Change, Steered, ThresholdConfig, ThresholdController
from app.metrics.table import PREFIX
from app.training.module import GRPOModule

NAME = "adaptive_threshold"


class AdaptiveThreshold(Callback):
    """Moves `upper` of the correction in force, and with a mask `lower` with it, towards a target.

    It must stand after MismatchGuard in the list of callbacks: where the guard has switched to another correction, the
    bound of that one is steered, from where it is configured.
    """

    def __init__(
        self,
        target: float | None = None,
        metric: Steered = "ess_exact",
        tolerance: float = 0.25,
        every_n_values: int = 5,
        min_upper: float = 1.05,
        max_upper: float = 10.0,
        max_change: float = 1.25,
    ) -> None:
        """Configure the target.

        Args:
            target: value of the metric, between 0 and 1; null: the bounds stay as they are configured.
            metric: ess_exact: at least `target`, with a bound as loose as that allows (control truncate only).
                clipped_frac: as near to `target` as the tolerance says.
            tolerance: the bound stays while the metric is in a band of this width, as a share of 1 - target above the
                target (ess_exact), or of target to both sides (clipped_frac).
            every_n_values: logged values of which the mean is compared with the target before each change.
            min_upper: least upper bound.
            max_upper: largest upper bound.
            max_change: largest factor by which log upper, the bound on the log-ratio, changes at once.
        """
        self.controller: ThresholdController | None = None
        if target is not None:
            self.controller = ThresholdController(
                ThresholdConfig(
                    metric=metric,
                    target=target,
                    tolerance=tolerance,
                    every_n_values=every_n_values,
                    min_upper=min_upper,
                    max_upper=max_upper,
                    max_change=max_change,
                )
            )
        self._changes: list[tuple[int, Change]] = []  # not written yet

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse at the start a correction that cannot be steered.

        Raises:
            LockstepError: naming the key.
        """
        assert isinstance(pl_module, GRPOModule)
        if self.controller is None:
            return
        offered = pl_module.corrections.offered
        bounded = [config for config in offered if config.level != "none"]
        try:
            for config in bounded or offered:
                self.controller.config.check(config)
        except ValueError as error:
            raise LockstepError(str(error)) from error

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        assert isinstance(pl_module, GRPOModule)
        if self.controller is not None and NAME in checkpoint:
            self.controller.load_state_dict(checkpoint[NAME])
            self._ask_for_bound(self.controller, pl_module)
            pl_module.take_up_correction()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the state. What is due to be logged is seen first, or the run that goes on would never see it."""
        assert isinstance(pl_module, GRPOModule)
        if self.controller is None:
            return
        if NAME in pl_module.step_log.listeners:
            pl_module.log_if_due()
        checkpoint[NAME] = self.controller.state_dict()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch what is logged from now on."""
        assert isinstance(pl_module, GRPOModule)
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked of every rank: it is broadcast
        if self.controller is not None:
            self.controller.steer(pl_module.corrections.base)
            pl_module.step_log.listeners[NAME] = functools.partial(self._judge, self.controller, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Write down what changed."""
        assert isinstance(pl_module, GRPOModule)
        if self.controller is None:
            return
        pl_module.log_if_due()
        changes, self._changes = self._changes, []
        for step, change in changes:
            if trainer.is_global_zero:
                self._write(trainer, step, change)

    def _judge(
        self, controller: ThresholdController, pl_module: GRPOModule, values: Mapping[str, float], step: int
    ) -> dict[str, float]:
        """Take in a logged value, unless it was measured under another bound, and ask for the bound that follows."""
        in_force = pl_module.correction
        measured = values.get(PREFIX + controller.config.metric)
        controller.steer(pl_module.corrections.base)
        self._ask_for_bound(controller, pl_module)
        if measured is not None and not pl_module.corrections.pending:
            change = controller.see(measured)
            if change is not None:
                self._changes.append((step, change))
                self._ask_for_bound(controller, pl_module)
        found = {} if in_force.upper is None else {f"{NAME}/upper": in_force.upper}
        return found if in_force.lower is None else {**found, f"{NAME}/lower": in_force.lower}

    @staticmethod
    def _ask_for_bound(controller: ThresholdController, pl_module: GRPOModule) -> None:
        pl_module.corrections.upper = controller.upper

    def _write(self, trainer: Trainer, step: int, change: Change) -> None:
        row = {
            "step": str(step),
            "before": f"{change.before:.6g}",
            "after": f"{change.after:.6g}",
            "mean": f"{change.mean:.6g}",
            "why": change.why,
        }
        path = self._folder / f"{NAME}.csv"
        try:
            append_csv(path, [row])
        except OSError as error:  # a full disk should not end the run for a table
            rank_zero_warn(f"{path}: cannot write ({error.strerror})")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(f"{NAME}/reason", change.why, step)
