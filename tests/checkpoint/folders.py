"""Checkpoints made by hand for tests of what is whole."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def put_file(path: Path, value: float = 0.0, age: int = 0) -> Path:
    """A checkpoint file whose only weight is `value`, `age` seconds old."""
    torch.save({"state_dict": {"w": torch.full((1000,), value)}}, path)
    return aged(path, age)


def put_folder(path: Path, size: int = 2, age: int = 0) -> Path:
    """A DeepSpeed folder of ZeRO-3, as far as its files go."""
    inner = path / "checkpoint"
    inner.mkdir(parents=True)
    for rank in range(size):
        torch.save({"dp_world_size": size}, inner / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"flat": torch.zeros(100)}, inner / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (path / "latest").write_text("checkpoint")
    return aged(path, age)


def aged(path: Path, seconds: int) -> Path:
    """Set the time of the last change back."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    return path


def cut(path: Path, left: int) -> None:
    """Cut a file to `left` bytes, and leave its time as it was."""
    times = path.stat()
    with path.open("r+b") as file:
        file.truncate(left)
    os.utime(path, (times.st_atime, times.st_mtime))
