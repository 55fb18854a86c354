"""How DeepSpeed's engine writes files here. Imports deepspeed: import this module only where an engine exists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from app.checkpoint.files import write_durably


class DurableEngine(TorchCheckpointEngine):
    """Writes to the disk itself, and keeps an error until all ranks are through.

    An error raised on one rank inside DeepSpeed's save would leave the others waiting at its next barrier.
    """

    error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, or keep the error for `check`."""
        self._attempt(lambda: write_durably(state_dict, Path(path)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, or keep the error for `check`."""
        self._attempt(lambda: Path(path).mkdir(parents=True, exist_ok=exist_ok))

    def check(self) -> None:
        """Raise the first error that was kept."""
        if self.error is not None:
            raise self.error

    def _attempt(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self.error = self.error or error


@contextlib.contextmanager
def durable_writes(engine: Any) -> Iterator[DurableEngine]:
    """Let the engine write through a DurableEngine, and not copy its recovery scripts into the folder."""
    original, writer = engine.checkpoint_engine, DurableEngine()
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda _: None  # `export` needs no script, and its error would not be kept
    try:
        yield writer
    finally:
        engine.checkpoint_engine = original
        del engine._copy_recovery_script
