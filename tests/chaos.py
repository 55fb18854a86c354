"""Kill a run again and again, let it go on, and compare its end with that of the undisturbed run.

    python -m tests.chaos --kills 20 --strategy deepspeed_stage_2 --devices 2

Every attempt is killed with all its processes (SIGKILL) at a random moment: while it starts, or some steps and a bit
later, while it samples, trains, writes a checkpoint or syncs. Moments are shares of the seconds that a start and a
rollout took in the undisturbed run, so that on a machine of any speed they fall into all of these. After each kill
every checkpoint under a valid name must be whole, and none may be lost. The last attempt runs to the end. Exit status 1
if the weights differ in a single bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from app.checkpoint.integrity import fault
from app.checkpoint.resolve import find_last
from tests.runs import COMMAND, ENVIRONMENT, ROOT, last_weights, quickstart, quickstart_args

STEPS_PER_ROLLOUT = 2
SETTINGS = (
    *("--data.val", "null", "--data.mini_batches", str(STEPS_PER_ROLLOUT), "--data.prompts_per_rollout", "8"),
    *("--checkpoint.every_n_train_steps", "1"),  # at every second step: checkpoints fall on the ends of rollouts
)
PATIENCE = 900.0
"""Seconds after which an attempt that writes no checkpoint is killed anyway."""


def chaos(folder: Path, *, kills: int, seed: int, steps: int, processes: list[str]) -> list[str]:
    """Return the names of the weights that differ in the end from those of the undisturbed run.

    Args:
        folder: for both runs.
        kills: how often the run is killed.
        seed: of the moments.
        steps: optimiser steps of a run; enough for two rollouts a kill.
        processes: arguments that say how many there are, and the strategy.

    Raises:
        AssertionError: if a checkpoint is broken or lost after a kill.
    """
    settings = [*SETTINGS, *processes, "--trainer.max_steps", str(steps)]
    start, rollout = undisturbed(folder / "undisturbed", settings)
    moments, done = random.Random(seed), 0
    for kill in range(kills):
        saves, delay = moments.randrange(3), moments.random()
        delay *= rollout if saves else start
        seconds = killed(folder / "disturbed", settings, saves, delay)
        step = step_of_last(folder / "disturbed" / "checkpoints")
        assert step >= done, f"the checkpoint of step {done} is lost"
        print(f"kill {kill + 1}: {saves} saves and {delay:.2f} s on, after {seconds:.1f} s, at step {step}", flush=True)
        done = step
    assert done < steps, f"the run ended before its last kill: give more than {steps} steps"
    quickstart(folder / "disturbed", *settings, "--ckpt_path", "last")
    expected, found = last_weights(folder / "undisturbed"), last_weights(folder / "disturbed")
    return [name for name, weight in expected.items() if not torch.equal(weight, found[name])]


def undisturbed(folder: Path, settings: list[str]) -> tuple[float, float]:
    """Do the whole run and return the seconds, about, that its start and each of its rollouts took."""
    began = time.perf_counter()
    quickstart(folder, *settings)
    whole, summary = time.perf_counter() - began, json.loads((folder / "summary.json").read_text())
    busy = sum(summary["seconds"].values())
    return whole - busy, busy * STEPS_PER_ROLLOUT / summary["steps"]


def killed(folder: Path, settings: list[str], saves: int, delay: float) -> float:
    """Go on with a run, kill it `delay` seconds after so many saves, and return its life in seconds."""
    command = [*COMMAND, *quickstart_args(folder, *settings, "--ckpt_path", "last")]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = time.perf_counter()
    run = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True, **silent)
    seen = names(folder / "checkpoints")
    while saves > 0 and time.perf_counter() - started < PATIENCE and run.poll() is None:
        time.sleep(0.02)
        new = names(folder / "checkpoints") - seen
        seen, saves = seen | new, saves - len(new)
    time.sleep(delay)
    assert run.poll() is None, f"the run ended by itself with status {run.returncode}"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    return time.perf_counter() - started


def names(folder: Path) -> set[str]:
    """Checkpoints under a valid name."""
    return {path.name for path in folder.glob("step=*.ckpt")}


def step_of_last(folder: Path) -> int:
    """Check that every checkpoint is whole and return the newest one's step; 0 if there is none yet."""
    for path in folder.glob("*.ckpt"):
        assert (wrong := fault(path)) is None, f"{path.name} {wrong}"
    last = find_last(folder)
    return 0 if last is None else int(last.resolve().stem.removeprefix("step="))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    given = parser.parse_args()
    processes = ["--trainer.devices", str(given.devices), "--trainer.strategy", given.strategy]
    with tempfile.TemporaryDirectory() as folder:
        differing = chaos(
            Path(folder), kills=given.kills, seed=given.seed, steps=6 * given.kills + 6, processes=processes
        )
    print(f"weights that differ: {', '.join(differing)}" if differing else "the weights are equal, bit for bit")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
