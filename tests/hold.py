"""A callback that keeps a run where a test needs it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class HoldAt(Callback):
    """Lets no step follow the given one before a file exists: what a test does meanwhile falls into that step."""

    def __init__(self, step: int, until: str) -> None:
        self.step = step
        self.until = Path(until)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Wait, at the end of the step."""
        while trainer.global_step == self.step and not self.until.exists():
            time.sleep(0.05)
