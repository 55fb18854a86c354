"""A collapse by stale weights, and its rescue: runs, table, numbers and picture, in one command.

python -m tests.benchmarks.collapse --out DIR [--seeds 1 2 3 4 5] [--steps 90] [--jobs 2]
                                    [--sync-every 24] [--stale-from 0]

The engine takes new weights only every 24th step and says that it took them all; the proof of the sync is off.
Finished runs in DIR are kept, so the command can be broken off and given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from tests.benchmarks.collapse_plot import Curve, plot
from tests.benchmarks.collapse_runs import ARMS, Experiment, run_all, values

LAST = 3
"""Scores at the end of a run whose mean is its result: one score of 400 sums has an error of about 0.015."""


def result(curve: Curve) -> float:
    """Return the mean of a run's last scores."""
    return statistics.fmean(curve[step] for step in sorted(curve)[-LAST:])


def lowest(curve: Curve) -> float:
    """Return a run's lowest score after the first, which is that of the policy that training starts from."""
    return min(curve[step] for step in sorted(curve)[1:])


def first_alarm(guard: Curve) -> int | None:
    """Return the step at which a guard's rule first fired: its level is then 2, and 1 while it only counts."""
    return min((step for step, level in guard.items() if level > 1), default=None)


def summarise(found: dict[str, dict[int, dict[str, Curve]]]) -> dict[str, dict[str, object]]:
    """Return the numbers of each arm.

    Args:
        found: arm -> seed -> metric -> curve; the first arm is the baseline, and every arm has its seeds.
    """
    baseline = next(iter(found.values()))
    table: dict[str, dict[str, object]] = {}
    for name, runs in found.items():
        results = {seed: result(run["exact_match"]) for seed, run in runs.items()}
        differences = [results[seed] - result(baseline[seed]["exact_match"]) for seed in runs]
        table[name] = {
            "exact_match": results,
            "mean": statistics.fmean(results.values()),
            "std": statistics.stdev(results.values()) if len(results) > 1 else 0.0,
            "lowest": statistics.fmean(lowest(run["exact_match"]) for run in runs.values()),
            "against_baseline": statistics.fmean(differences),
            "worst_against_baseline": min(differences),
            "last_step": {seed: max(run["k3"], default=0) for seed, run in runs.items()},
            "first_alarm": {seed: first_alarm(run["guard"]) for seed, run in runs.items()},
        }
    return table


def as_text(summary: dict[str, dict[str, object]]) -> str:
    """Return the summary as an aligned table."""
    width = max(len(ARMS[name].label) for name in summary)
    lines = [
        f"{'':{width}}  exact match    std  range          lowest  against healthy (worst)  ends at  guard fires at"
    ]
    for name, row in summary.items():
        results = list(row["exact_match"].values())  # type: ignore[attr-defined]
        ends = _range(row["last_step"].values())  # type: ignore[attr-defined]
        alarms = _range(row["first_alarm"].values())  # type: ignore[attr-defined]
        lines.append(
            f"{ARMS[name].label:{width}}  {row['mean']:11.3f}  {row['std']:.3f}  {min(results):.3f}–{max(results):.3f}"
            f"    {row['lowest']:.3f}   {row['against_baseline']:+.3f}  ({row['worst_against_baseline']:+.3f})"
            f"        {ends:7}  {alarms}"
        )
    return "\n".join(lines)


def _range(steps: Iterable[int | None]) -> str:
    """Return the least and the largest step, and how many runs have none."""
    every = list(steps)
    known = sorted(step for step in every if step is not None)
    if not known:
        return "never"
    ends = f"{known[0]}–{known[-1]}" if known[0] < known[-1] else str(known[0])
    return ends if len(known) == len(every) else f"{ends}, {len(every) - len(known)} of {len(every)} never"


def main() -> None:
    """Run, and write `collapse.json` and `collapse.png` into the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--sync-every", type=int, default=24, help="steps between syncs that arrive; 0: none arrives")
    parser.add_argument("--stale-from", type=int, default=0, help="step from which on the others are lost")
    args = parser.parse_args()
    experiment = Experiment(steps=args.steps, stale_from=args.stale_from, sync_every=args.sync_every)
    run_all(args.out, args.seeds, experiment, args.jobs)
    found = {name: {seed: values(args.out, name, seed, experiment) for seed in args.seeds} for name in ARMS}
    summary = summarise(found)
    (args.out / "collapse.json").write_text(
        json.dumps({**dataclasses.asdict(experiment), "arms": summary}, indent=2) + "\n"
    )
    plot(args.out / "collapse.png", found, {name: ARMS[name].label for name in ARMS}, experiment.arrivals)
    print(as_text(summary))


if __name__ == "__main__":
    main()
