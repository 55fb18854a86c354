"""Steers the bound of the correction to an effective sample size or a clipped share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from app.dashboard.row_table import add_text, append_csv
from app.guards.threshold import NAME, BoundSteering, Change, Steered, ThresholdConfig, ThresholdController
from app.training.module import GRPOModule


class AdaptiveThreshold(Callback):
    """Moves `upper` of the correction in force, and with a mask `lower` with it, towards a target.

    The steering itself is a watcher of the module's RunControl, which applies it; this callback makes it and reports
    what it changed. Where the guard has switched to another correction, the bound of that one is steered, from where it
    is configured.
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
        self.steering: BoundSteering | None = None
        if target is not None:
            config = ThresholdConfig(
                metric=metric,
                target=target,
                tolerance=tolerance,
                every_n_values=every_n_values,
                min_upper=min_upper,
                max_upper=max_upper,
                max_change=max_change,
            )
            self.steering = BoundSteering(ThresholdController(config))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the steering to the run's control."""
        assert isinstance(pl_module, GRPOModule)
        if self.steering is not None:
            pl_module.run_control.watch(self.steering)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the folder of the table; what an earlier run changed is forgotten."""
        if self.steering is not None:
            self.steering.take_changes()
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked of every rank: it is broadcast

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Write down what changed."""
        if self.steering is None:
            return
        for step, change in self.steering.take_changes():
            if trainer.is_global_zero:
                self._write(trainer, step, change)

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
        add_text(trainer.loggers, f"{NAME}/reason", change.why, step)
