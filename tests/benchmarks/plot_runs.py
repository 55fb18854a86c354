"""Curves of some runs as one PNG: reward, and the mismatch beneath it.

python -m tests.benchmarks.plot_runs OUT.png LABEL=RUN_FOLDER [LABEL=RUN_FOLDER ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PANELS = [
    ("rollout/reward_mean", "reward", "linear"),
    ("rollout_correction/logprob_abs_diff_mean", "mean |old − rollout| (nats)", "log"),
    ("rollout_correction/k3_kl", "k3 estimate of KL(rollout ‖ train)", "log"),
]


def curve(run: Path, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of a scalar in the newest version of a run."""
    version = max((run / "lightning_logs").glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    events = EventAccumulator(str(version))
    events.Reload()
    points = events.Scalars(tag)
    return [point.step for point in points], [point.value for point in points]


def plot(out: Path, runs: dict[str, Path]) -> None:
    """Draw one panel below the other, one line per run."""
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(7, 7), sharex=True, constrained_layout=True)
    for axis, (tag, name, scale) in zip(axes, PANELS, strict=True):
        for label, run in runs.items():
            steps, values = curve(run, tag)
            axis.plot(steps, [max(value, 1e-14) if scale == "log" else value for value in values], label=label)
        axis.set(ylabel=name, yscale=scale)
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[-1].set_xlabel("optimiser step")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), {label: Path(run) for label, run in (arg.split("=", 1) for arg in sys.argv[2:])})
