"""Whole runs of the command line, and what they left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from app.checkpoint.resolve import find_last
from app.checkpoint.weights import read_weights

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "app"]


def run(*args: str, cwd: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end."""
    done = subprocess.run([*COMMAND, *args], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def quickstart_args(folder: Path, *args: str) -> list[str]:
    """The arguments of the quickstart in `folder`, with changes."""
    return ["fit", "--config", QUICKSTART, "--trainer.default_root_dir", str(folder), *args]


def quickstart(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the quickstart in `folder`, with changes."""
    return run(*quickstart_args(folder, *args))


def scalars(folder: Path, tag: str) -> list[float]:
    """The values of a tag in a run folder, over all its versions."""
    values: list[float] = []
    for version in sorted((folder / "lightning_logs").iterdir()):
        events = EventAccumulator(str(version))
        events.Reload()
        if tag in events.Tags()["scalars"]:
            values += [event.value for event in events.Scalars(tag)]
    return values


def last_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a run's last checkpoint, whatever strategy wrote it."""
    path = find_last(folder / "checkpoints")
    assert path is not None, f"no checkpoint in {folder}"
    return read_weights(path)


def assert_equal_weights(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Compare weights, bit for bit or within an absolute and relative tolerance."""
    assert one.keys() == other.keys()
    for name, weight in one.items():
        if tolerance:
            torch.testing.assert_close(other[name], weight, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(other[name], weight), name
