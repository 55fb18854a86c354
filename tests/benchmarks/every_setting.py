"""Run the quickstart for a few steps with every preset and every loss, and say what came of each.

    python -m tests.benchmarks.every_setting OUT_FOLDER [--steps 30] [--only NAME ...]

Presets run with bfloat16 rollouts, so that there is a mismatch to act on, and one optimiser step a rollout; losses with
four of them, so that new and old part. Prints one Markdown row a run: exit status, held-out score before and after, the
mean of a few metrics, and the first line of trouble if there was any. Exit status 1 if a run failed or a value was not
finite.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.maths.correction import PRESETS
from app.maths.objective.config import LossType

SHOWN = (
    "rollout_correction/k3_kl",
    "rollout_correction/ess_exact",
    "rollout_correction/rejected_sequence_fraction",
    "policy/trained_token_fraction",
    "policy/skipped_update_fraction",
)
HEAD = ("setting", "exit", "before", "after", *(key.split("/")[1] for key in SHOWN), "seconds", "trouble")


def settings() -> dict[str, list[str]]:
    """Name of a run -> its arguments."""
    runs: dict[str, list[str]] = {}
    for name, config in PRESETS.items():
        runs[f"preset {name}"] = ["--model.correction.preset", name, "--data.engine.dtype", "bfloat16"]
        if (config.bypass and config.level != "none") or "bypass_pg" in name:  # weights in the place of a ratio
            runs[f"preset {name}"] += ["--model.loss.loss_type", "reinforce"]
    for name in get_args(LossType):
        runs[f"loss {name}"] = ["--model.loss.loss_type", name, "--data.mini_batches", "4"]
    return runs


def scalars(folder: Path) -> dict[str, list[float]]:
    """Every scalar that a run logged."""
    values: dict[str, list[float]] = {}
    for version in sorted((folder / "lightning_logs").glob("version_*")):
        events = EventAccumulator(str(version))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values.setdefault(tag, []).extend(event.value for event in events.Scalars(tag))
    return values


def run(name: str, arguments: list[str], folder: Path, steps: int) -> tuple[list[str], bool]:
    """Run one setting; return its row and whether it was clean."""
    command = [sys.executable, "-m", "app", "fit", "--config", "configs/quickstart.yaml"]
    command += ["--trainer.default_root_dir", str(folder), "--trainer.max_steps", str(steps), *arguments]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    logged = scalars(folder)
    broken = sorted(tag for tag, values in logged.items() if not all(map(math.isfinite, values)))
    trouble = f"not finite: {', '.join(broken)}" if broken else ""
    before = after = math.nan
    if done.returncode:
        trouble = done.stderr.strip().splitlines()[-1]
    else:
        summary = json.loads((folder / "summary.json").read_text())
        before, after = (summary[when]["val/exact_match"] for when in ("before", "after"))
    means = [f"{sum(logged[key]) / len(logged[key]):.3g}" if logged.get(key) else "–" for key in SHOWN]
    row = [name, str(done.returncode), f"{before:.3f}", f"{after:.3f}", *means, f"{seconds:.0f}", trouble]
    return row, not done.returncode and not broken


def main() -> None:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=None, help="names of the first column")
    options = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n" + "| --- " * len(HEAD) + "|", flush=True)
    clean = True
    for name, arguments in settings().items():
        if options.only and name not in options.only:
            continue
        row, fine = run(name, arguments, options.out / name.replace("/", "-").replace(" ", "-"), options.steps)
        clean &= fine
        print("| " + " | ".join(row) + " |", flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
