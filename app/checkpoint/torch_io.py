"""Checkpoint files for a single process and DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.checkpoint.files import write_file
from app.checkpoint.zero import INEXACT, ZeroFolder


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a file whole or not at all, and reads DeepSpeed folders too.

    Lightning's own writes into $TMPDIR and moves the file from there, which is a copy, and no atomic one, where that is
    another file system; and it builds the whole file in memory first.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint.

        Raises:
            SaveError: if it cannot be written.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_file(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; a DeepSpeed folder becomes what one process would have written."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        folder = ZeroFolder(Path(path))
        rank_zero_info(f"{Path(path).name} was written by {folder.origin} and is put together; {INEXACT}")
        state = folder.state()
        return {
            **state.lightning,
            "state_dict": folder.weights(),
            "optimizer_states": [state.optimizer_state()],
        }
