"""Global values of training, logged when it is time, and shown to those who decide by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from app.dashboard.logger import DashboardLogger
from app.training.meters import StepMeters
from app.training.timers import Phases

PROGRESS = {
    "reward": "rollout/reward_mean",
    "k3_kl": "rollout_correction/k3_kl",
    "tok/s": "time/tokens_per_second",
}
"""Name on the progress bar -> key of the logged value."""

Listener = Callable[[Mapping[str, float], int], Mapping[str, float]]
"""Takes values that are the same on every rank, and the number of optimiser steps done; returns what to log with them.
It is called between two optimiser steps, on all ranks."""


class StepLog:
    """Logs every `log_every_n_steps` optimiser steps, and at the last one."""

    def __init__(self) -> None:
        self.listeners: dict[str, Listener] = {}
        """By name, in the order in which they are asked; they need no collective of their own."""
        self.step = 0
        """The optimiser step that was logged last, or that the run goes on from."""
        self._shown: dict[str, float] = {}

    def log_if_due(self, trainer: Any, meters: StepMeters, phases: Phases) -> None:
        """Log the interval that has ended, if one has. All ranks must call it together."""
        done = trainer.global_step
        if done == self.step:
            return  # inside an accumulation window, or logged already
        if done % trainer.log_every_n_steps and done != trainer.max_steps:
            return
        self.step = done
        values, histograms = meters.compute_and_reset()
        for listener in self.listeners.values():
            values |= listener(values, done)
        values |= phases.read()  # of this process: nothing that all ranks decide may depend on it
        for logger in trainer.loggers:
            logger.log_metrics(values, step=done)
            if isinstance(logger, DashboardLogger):
                logger.log_histograms(histograms, step=done)
        self._shown = {name: values[key] for name, key in PROGRESS.items() if key in values}
        # for callbacks that monitor a value; `log_dict` would take 20 ms for so many
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def take_shown(self) -> dict[str, float]:
        """Return what the progress bar should show, once."""
        shown, self._shown = self._shown, {}
        return shown
