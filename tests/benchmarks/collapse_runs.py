"""The runs of the collapse experiment: their arms, their command lines, and what is read from them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.collapse_parts import EXACT_MATCH, arrives
from tests.runs import COMMAND, ENVIRONMENT, QUICKSTART, ROOT

METRICS = {
    "exact_match": EXACT_MATCH,
    "k3": "rollout_correction/k3_kl",
    "ess": "rollout_correction/ess_exact",
    "grad_norm": "policy/grad_norm",
    "trained": "policy/trained_token_fraction",
}
"""Short name -> key of the logged value."""
GUARD_NAME = "stale"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all runs have in common."""

    steps: int
    """Optimiser steps."""
    stale_from: int
    """Step from which on the faulty engine loses weights; see `StaleEngine`."""
    sync_every: int
    """Steps from one set of weights that the faulty engine takes to the next; 0: it takes no more."""

    @property
    def arrivals(self) -> list[int]:
        """The steps from `stale_from` on whose weights arrive."""
        steps = range(self.stale_from, self.steps + 1)
        return [step for step in steps if arrives(step, self.stale_from, self.sync_every)]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting, run with every seed."""

    label: str
    """Name in the picture and the table."""
    faulty: bool = True
    """Whether the engine loses weights."""
    preset: str | None = None
    """Correction from the first step on."""
    guard: str | None = None
    """Action of the guard besides the warning; None: it only warns."""


ARMS = {
    "on_policy": Arm(label="healthy engine, guard armed", faulty=False, guard="correct"),
    "uncorrected": Arm(label="stale engine, no correction"),
    "token_truncate": Arm(label="stale, token_truncate", preset="swift/token_truncate"),
    "token_icepop": Arm(label="stale, token_icepop mask", preset="verl/token_icepop"),
    "seq_is": Arm(label="stale, seq_is (product, truncated)", preset="verl/seq_is"),
    "geo_rs": Arm(label="stale, geo_rs [0.999, 1.001]", preset="verl/geo_rs"),
    "guard_correct": Arm(label="stale, guard switches token_truncate on", guard="correct"),
    "guard_stop": Arm(label="stale, guard stops", guard="stop"),
}
"""Folder name -> arm. The first is what the others are compared with."""


def command(arm: Arm, seed: int, experiment: Experiment, folder: Path) -> list[str]:
    """Return the command line of a run: the quickstart with the engine, the score and the guard of an arm."""
    engine: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 256}
    name = "app.engine.vllm.engine.VLLMEngine"
    if arm.faulty:
        name = "tests.benchmarks.collapse_parts.StaleEngine"
        engine |= {"stale_from": experiment.stale_from, "sync_every": experiment.sync_every}
    rule: dict[str, Any] = {"metric": "k3_kl", "above": 0.01, "patience": 2, "name": GUARD_NAME}
    rule |= {"actions": ["warn"]} if arm.guard is None else {"actions": ["warn", arm.guard]}
    rule |= {"keep": True} if arm.guard == "correct" else {}
    settings = {
        "seed_everything": seed,
        "data.val": None,
        "data.engine": {"class_path": name, "init_args": engine},
        "model.correction.preset": arm.preset,
        "weight_sync.verify": "off",
        "mismatch_guard.rules": [rule],
        "trainer.callbacks": [{"class_path": "tests.benchmarks.collapse_parts.ExactMatch"}],
        "trainer.max_steps": experiment.steps,
        "trainer.default_root_dir": str(folder),
        "trainer.enable_checkpointing": False,
        "trainer.enable_progress_bar": False,
    }
    args = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    return [*COMMAND, "fit", "--config", QUICKSTART, *args]


def run_all(out: Path, seeds: list[int], experiment: Experiment, jobs: int) -> None:
    """Run what is not in `out` yet, `jobs` at a time, with one line of progress each.

    Raises:
        RuntimeError: if a run failed; its log is named.
    """
    todo = [(name, seed) for seed in seeds for name in ARMS if not _values_path(out, name, seed, experiment).exists()]
    start, done = time.monotonic(), 0

    def one(job: tuple[str, int]) -> None:
        nonlocal done
        seconds = _run(out, *job, experiment)
        done += 1
        left = (time.monotonic() - start) / done * (len(todo) - done)
        print(f"{done}/{len(todo)}  {job[0]} seed {job[1]}: {seconds:.0f} s, {left / 60:.0f} min left", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, todo))


def values(out: Path, name: str, seed: int, experiment: Experiment) -> dict[str, dict[int, float]]:
    """Return what a finished run logged: metric -> step -> value; and the guard's level under `guard`."""
    stored = json.loads(_values_path(out, name, seed, experiment).read_text())
    return {metric: {int(step): value for step, value in curve.items()} for metric, curve in stored.items()}


def _values_path(out: Path, name: str, seed: int, experiment: Experiment) -> Path:
    fault = f"_stale_from_{experiment.stale_from}_every_{experiment.sync_every}" if ARMS[name].faulty else ""
    return out / name / f"seed_{seed}_steps_{experiment.steps}{fault}.json"


def _run(out: Path, name: str, seed: int, experiment: Experiment) -> float:
    arm, path = ARMS[name], _values_path(out, name, seed, experiment)
    folder = path.with_suffix("") / str(time.time_ns())  # never on top of a run that was cut off
    folder.mkdir(parents=True)
    log, start = folder / "log.txt", time.monotonic()
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    line = command(arm, seed, experiment, folder)
    with log.open("w") as file:
        code = subprocess.run(line, cwd=ROOT, env=environment, stdout=file, stderr=file).returncode
    stopped = arm.guard == "stop" and "the run ends" in log.read_text()
    if code != 0 and not stopped:
        raise RuntimeError(f"{name} seed {seed} failed with exit status {code}: see {log}")
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(_read(folder)))
    unfinished.rename(path)
    return time.monotonic() - start


def _read(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "lightning_logs" / "version_0"), size_guidance={"scalars": 0})
    events.Reload()
    tags = METRICS | {"guard": f"mismatch_guard/{GUARD_NAME}"}
    known = events.Tags()["scalars"]
    return {
        metric: {event.step: event.value for event in events.Scalars(tag)} if tag in known else {}
        for metric, tag in tags.items()
    }
