"""What a training step gives to Lightning and to callbacks."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from app.training.step_correction import CorrectedBatch


class Corrected:
    """What the loss took of a micro-batch, on its way through Lightning; no dataclass, as TrainStep is none."""

    __slots__ = ("batch",)

    def __init__(self, batch: CorrectedBatch) -> None:
        self.batch = batch


class StepOutput(TypedDict):
    """What `training_step` returns: Lightning takes the loss, callbacks get all of it as `outputs`."""

    loss: Tensor
    corrected: Corrected
