"""The end of an optimiser step: global values are decided by, and logged, when it is time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from app.dashboard.logger import DashboardLogger
from app.errors import LockstepError
from app.guards.run_control import RunControl
from app.metrics.drawing import Histogram
from app.training.checks import check_trainer
from app.training.meters import StepMeters
from app.training.timers import Timers

PROGRESS = {
    "reward": "rollout/reward_mean",
    "k3_kl": "rollout_correction/k3_kl",
    "tok/s": "time/tokens_per_second",
}
"""Name on the progress bar -> key of the logged value."""


class StepLog:
    """Closes optimiser steps: logs every `log_every_n_steps` of them and the last one, and lets the control decide.

    The order of an optimiser step, held by a test:

    1. `training_step` and backward of each micro-batch; gradients are summed.
    2. `GRPOModule.on_before_optimizer_step`: the gradient is measured; a step that is not finite is left out.
    3. The optimiser moves the weights, then the schedule sets the rate of the next step.
    4. `close`: meters -> global values -> watchers -> their wishes are applied (correction, bound, rate, stop).
    5. Callbacks' `on_train_batch_end`: weights to the engine if the rollout is used up, reports, checkpoints.
    6. `GRPOModule.on_train_batch_end`: `write` hands the values to the loggers (a checkpoint in 5 has it done before
       it is written); a run that is to stop ends here, saved.
    7. A validation, if one is due: the trainer's weights are sent to the engine first.
    8. The loader samples the next rollout, if the last one is used up.

    Micro-batches that do not complete a step go through 1, 5 and 6 alone.
    """

    def __init__(self) -> None:
        self._unwritten: tuple[int, dict[str, float], dict[str, Histogram]] | None = None
        self._shown: dict[str, float] = {}
        self._closed = 0

    def begin(self, trainer: Any) -> None:
        """Begin a run at the step that it starts or goes on from; what an earlier one left unwritten is forgotten.

        Raises:
            LockstepError: if the settings would leave optimiser steps unclosed.
        """
        check_trainer(trainer)
        self._unwritten, self._closed = None, trainer.global_step

    def close(
        self, trainer: Any, schedule: LambdaLR, meters: StepMeters, timers: Timers, run_control: RunControl
    ) -> None:
        """End an optimiser step, after the weights moved. All ranks must call it together."""
        timers.stop_update()
        self._closed = step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 or step == trainer.max_steps:
            values, histograms = meters.compute_and_reset()
            values |= run_control.see(values, step)
            self._unwritten = step, values, histograms
            self._publish(trainer, values)
        run_control.apply(schedule)
        if run_control.stop is not None:
            trainer.should_stop = True

    def end_batch(self, trainer: Any, timers: Timers) -> None:
        """End a micro-batch: write what is due.

        Raises:
            LockstepError: if an optimiser step was not closed: nothing would be logged or decided by any more.
        """
        if self._closed != trainer.global_step:
            raise LockstepError(
                f"optimiser step {trainer.global_step} was not closed: something took the learning-rate schedule away "
                "(StochasticWeightAveraging, or a lr_scheduler_step that does not call its super())"
            )
        self.write(trainer, timers)

    def write(self, trainer: Any, timers: Timers) -> None:
        """Hand the values of the last closed step to the loggers, with the seconds up to now, if that is still due."""
        if self._unwritten is None:
            return
        (step, values, histograms), self._unwritten = self._unwritten, None
        seconds = timers.read()  # of this process: nothing that all ranks decide may depend on it
        values |= seconds
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
            if isinstance(logger, DashboardLogger):
                logger.log_histograms(histograms, step=step)
        self._publish(trainer, seconds)
        self._shown = {name: values[key] for name, key in PROGRESS.items() if key in values}

    @staticmethod
    def _publish(trainer: Any, values: Mapping[str, float]) -> None:
        """Show values to callbacks that monitor one; `log_dict` would take 20 ms for so many."""
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def take_shown(self) -> dict[str, float]:
        """Return what the progress bar should show, once."""
        shown, self._shown = self._shown, {}
        return shown
