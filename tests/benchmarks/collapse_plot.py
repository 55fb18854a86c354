"""The picture of the collapse experiment: exact match, and the mismatch beneath it."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curve = dict[int, float]
PANELS = [
    ("exact_match", "exact match, held out", "linear"),
    ("k3", "k3_kl (nats)", "log"),
    ("ess", "ess_exact", "linear"),
    ("trained", "tokens\ntrained on", "linear"),
]
COLOURS = ["black", "tab:red", "tab:green", "tab:blue", "tab:purple", "tab:brown", "tab:orange", "tab:gray"]
FLOOR = 1e-6
"""Smallest value on a logarithmic axis: rounding alone lies far below."""


def spread(runs: list[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the steps that all runs have, and mean, least and largest value of each."""
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    at = [[run[step] for run in runs] for step in steps]
    return steps, [sum(v) / len(v) for v in at], [min(v) for v in at], [max(v) for v in at]


def plot(out: Path, found: dict[str, dict[int, dict[str, Curve]]], labels: dict[str, str], arrivals: list[int]) -> None:
    """Draw each arm's mean as a line and its range over seeds as a band.

    Args:
        out: the PNG to write.
        found: arm -> seed -> metric -> curve.
        labels: arm -> what the legend says.
        arrivals: steps whose weights the faulty engine takes, drawn as vertical lines.
    """
    heights = [3, *(1 for _ in PANELS[1:])]
    figure, axes = plt.subplots(
        len(PANELS), 1, figsize=(9, 10), sharex=True, constrained_layout=True, height_ratios=heights
    )
    for axis, (metric, name, scale) in zip(axes, PANELS, strict=True):
        for colour, (arm, runs) in zip(COLOURS, found.items(), strict=False):
            steps, mean, low, high = spread([run[metric] for run in runs.values()])
            if scale == "log":
                mean, low, high = ([max(value, FLOOR) for value in values] for values in (mean, low, high))
            axis.plot(steps, mean, color=colour, label=labels[arm])
            axis.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        for step in arrivals:
            axis.axvline(step, color="black", linestyle=":", linewidth=1)
        axis.set(ylabel=name, yscale=scale)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right", fontsize=9)
    axes[0].set_ylim(0, 1)
    axes[-1].set_xlabel("optimiser step (dotted: weights that reach the stale engine)")
    figure.savefig(out, dpi=110)
    plt.close(figure)
