"""A RolloutCheckpoint that writes nothing."""

from __future__ import annotations

from callbacks.rollout_checkpoint import RolloutCheckpoint


class Saves(RolloutCheckpoint):
    """Notes the steps at which it would save."""

    def __init__(self, **kwargs):
        super().__init__(dirpath="unused", **kwargs)
        self.steps = []

    def save(self, trainer):
        self.steps.append(trainer.global_step)
        self._last_global_step_saved = trainer.global_step
