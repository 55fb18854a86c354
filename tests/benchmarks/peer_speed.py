"""Correction and diagnostics beside verl's, on the same rows in one run: seconds and peak extra memory.

python -m tests.benchmarks.peer_speed [ROUNDS]      (Linux; about six minutes on two cores)

The peer is `compute_rollout_correction_and_rejection_mask` of the released package, unchanged and with nothing
stubbed. Importing it imports `verl`, and that imports Ray and tensordict; so PACKAGES, and no dependencies of
theirs, go into a temporary folder that is removed at the end. Everything else (torch, transformers, numpy, ...)
is the running environment's: both sides compute with the same torch, and neither import is timed.

A side is measured in fresh processes, the two in turn. After a warm-up on four short rows and once the inputs
exist, three calls are timed. Memory is taken in a process of its own: the largest resident set during the first
call less the one before it, results included, with every large tensor in a mapping of its own, so that pages that
malloc kept from making the inputs are not mistaken for no use at all. The peer gets the int64 mask that its trainer
hands it, ours the bool one of ours. Values that both report must agree, or the comparison would mean nothing.

Each setting is measured three times: on one thread, on two, and on two while a spinning process competes for every
core, as the engine, the data and other jobs do on a machine that trains.

Exit status 1 if a demanded ratio does not hold. Ratios are of the least seconds; CPU seconds are of all threads and
say, beside the wall-clock ones, what a machine shared with others has added.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.maths.correction import CorrectionConfig, RejectionRule, correct
from app.metrics import diagnose

PACKAGES = (
    "verl==0.9.1",
    "tensordict==0.10.0",
    "ray==2.60.0",
    "pyvers==0.2.3",
    "omegaconf==2.4.0",
    "codetiming==1.4.0",
    "orjson==3.13.0",
)
ROWS, TOKENS = 256, 8192
CALLS = 3
SPEED_DEMANDED, MEMORY_DEMANDED = 8.0, 0.25
SIDES = ("peer", "ours")
SHARED_VALUES = {
    **{key: key for key in ("kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "ppl_ratio", "chi2_token")},
    "rollout_is_mean": "is_weight_mean",
    "rollout_is_eff_sample_size": "ess_exact",
}
"""The peer's name -> ours, of values with one definition on both sides (a row's statistics: no row is empty)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One configuration in both sides' terms."""

    name: str
    """Shown in the table."""
    peer: dict[str, Any]
    """Keyword arguments of the peer's function."""
    ours: CorrectionConfig
    """The same for `correct`."""


SETTINGS = (
    Setting(
        name="token weights ≤ 2",
        peer={"rollout_is": "token", "rollout_is_threshold": 2.0},
        ours=CorrectionConfig(level="token", upper=2.0),
    ),
    Setting(
        name="… normalised, k3 rejection",
        peer={
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": True,
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": 0.01,
        },
        ours=CorrectionConfig(
            level="token",
            upper=2.0,
            batch_normalize=True,
            rejection=(RejectionRule(level="geometric", statistic="k3", upper=0.01),),
        ),
    ),
)


def make_rows(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Old and rollout log-probabilities and mask, [rows, tokens]: bfloat16-like noise, one token in 1,000 far off."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.empty(rows, tokens).exponential_(1.0, generator=generator)
    noise = 0.02 * torch.randn(rows, tokens, generator=generator)
    far = torch.rand(rows, tokens, generator=generator) < 1e-3
    noise = torch.where(far, 3 * torch.rand(rows, tokens, generator=generator) - 1.5, noise)  # k3 stays below our cap
    lengths = torch.randint(max(1, tokens // 8), tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    return old.masked_fill(~mask, 0.0), (old - noise).clamp(max=0.0).masked_fill(~mask, 0.0), mask


def load_side(side: str, setting: Setting, packages: str) -> Callable[[Tensor, Tensor, Tensor], tuple]:
    """Return a function that corrects and diagnoses, with the named values last in what it returns."""
    if side == "ours":
        return lambda old, rollout, mask: (
            correct(old, rollout, mask, setting.ours),
            diagnose(old, rollout, mask, setting.ours),
        )
    sys.path.append(packages)  # last: what the running environment has, it provides
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    return lambda old, rollout, mask: helper.compute_rollout_correction_and_rejection_mask(
        old, rollout, mask, **setting.peer
    )


def measure_here(side: str, setting: Setting, threads: int, packages: str) -> dict[str, Any]:
    """Seconds of each call, extra bytes of the first, and the values; in the process that this is called in."""
    torch.set_num_threads(threads)
    run = load_side(side, setting, packages)
    mask_dtype = torch.int64 if side == "peer" else torch.bool
    old, rollout, mask = make_rows(4, 64)
    run(old, rollout, mask.to(mask_dtype))
    old, rollout, mask = make_rows(ROWS, TOKENS)
    mask = mask.to(mask_dtype)

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = resident("VmRSS")
    seconds, cpu_seconds, extra = [], [], 0
    for call in range(CALLS):
        start, cpu_start = time.perf_counter(), time.process_time()
        results = run(old, rollout, mask)
        cpu_seconds.append(time.process_time() - cpu_start)
        seconds.append(time.perf_counter() - start)
        if call == 0:
            extra = resident("VmHWM") - before
        values = results[-1]
        del results
    short = {key.split("/")[-1]: value for key, value in values.items()}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "extra": extra, "values": short}


def resident(name: str) -> int:
    """A line of this process's status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"no {name} in /proc/self/status: memory cannot be measured on this system")
    return int(found[1]) * 1024


def measure_apart(side: str, setting: int, threads: int, packages: str, memory: bool = False) -> dict[str, Any]:
    """`measure_here` in a fresh process. `memory`: for the sake of its bytes, not of its seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if memory:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)  # glibc's own start, which it would raise at each free
    command = [sys.executable, "-m", "tests.benchmarks.peer_speed", "child", side, str(setting), str(threads), packages]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode:
        raise SystemExit(f"{side} with {threads} threads failed:\n{child.stderr}")
    return json.loads(child.stdout.splitlines()[-1])


def check_values(peer: dict[str, float], ours: dict[str, float]) -> None:
    """Stop if the sides disagree by more than the peer's float32 sums explain."""
    for theirs, mine in SHARED_VALUES.items():
        if abs(peer[theirs] - ours[mine]) > 1e-6 + 1e-3 * abs(ours[mine]):
            raise SystemExit(f"the sides disagree: peer {theirs}={peer[theirs]}, ours {mine}={ours[mine]}")


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """Keep `count` processes spinning."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()


def compare(index: int, threads: int, busy: bool, rounds: int, packages: str) -> bool:
    """Measure both sides in turn, print three lines, and return whether both demands hold."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with competitors((os.cpu_count() or 1) if busy else 0):
        for _ in range(rounds):
            for side in SIDES:
                runs[side].append(measure_apart(side, index, threads, packages))
    extra = {side: measure_apart(side, index, threads, packages, memory=True)["extra"] for side in SIDES}
    check_values(runs["peer"][0]["values"], runs["ours"][0]["values"])

    least: dict[str, float] = {}
    middle: dict[str, float] = {}
    for side in SIDES:
        seconds = [value for run in runs[side] for value in run["seconds"]]
        least[side], middle[side] = min(seconds), statistics.median(seconds)
        cpu = min(value for run in runs[side] for value in run["cpu_seconds"])
        columns = f"{least[side]:8.3f} {middle[side]:8.3f} {cpu:11.3f} {extra[side] / 2**20:10.1f}"
        columns += f" {len(runs[side][0]['values']):7}"
        print(f"{SETTINGS[index].name:27} {threads:7} {'busy' if busy else 'idle':>7} {side:>5} {columns}")
    speed, by_median = least["peer"] / least["ours"], middle["peer"] / middle["ours"]
    memory = extra["ours"] / extra["peer"]
    fast, small = speed >= SPEED_DEMANDED, memory <= MEMORY_DEMANDED
    verdicts = {True: "holds", False: "DOES NOT HOLD"}
    print(
        f"  faster {speed:.1f}x by the least, {by_median:.1f}x by the median ({SPEED_DEMANDED:g}x {verdicts[fast]}); "
        f"memory {memory:.2f} of the peer's ({MEMORY_DEMANDED:g} {verdicts[small]})",
        flush=True,
    )
    return fast and small


def main(rounds: int) -> int:
    """Install the peer, compare, and return the exit status."""
    with tempfile.TemporaryDirectory() as packages:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, *PACKAGES]
        subprocess.run(install, check=True)
        print(f"{PACKAGES[0]}, torch {torch.__version__}; {ROWS} x {TOKENS} float32; load {os.getloadavg()[0]:.1f}")
        head = f"{'setting':27} {'threads':>7} {'machine':>7} {'side':>5} {'least s':>8} {'median s':>8}"
        print(f"{head} {'least CPU s':>11} {'extra MiB':>10} {'values':>7}", flush=True)
        held = [
            compare(index, threads, busy, rounds, packages)
            for index in range(len(SETTINGS))
            for threads, busy in ((1, False), (2, False), (2, True))
        ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _, _, side, setting, threads, packages = sys.argv
        print(json.dumps(measure_here(side, SETTINGS[int(setting)], int(threads), packages)))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
