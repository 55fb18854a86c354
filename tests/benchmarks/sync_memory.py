"""Memory and time of a weight sync under ZeRO-3: two processes on the CPU, each with an engine of its own.

python -m tests.benchmarks.sync_memory MODEL_FOLDER      (Linux)

Every parameter is partitioned (stage3_param_persistence_threshold 0), and the engine writes in place, so what a sync
needs beside what was there before is gathered weights and temporaries; both sides' checksums are part of it. One sync
comes before those that are measured: an engine's weights come mapped from their file, and are its own memory only
after the first write. Memory is the largest resident set less the one before, the larger of the two processes.

The first row is the least that any gathering can need here: one plain all_gather of the largest parameter. Torch's
gloo backend collects it in a buffer of its own before it copies it out, which doubles it; NCCL has no such copy.

Exit status 1 if a sync needs more than twice the model's largest parameter, to the per cent.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from app.engine.transformers_engine import TransformersEngine
from app.policy.loading import load_policy
from app.policy.lora import LoraSettings, add_adapters
from app.sync.synchroniser import WeightSynchroniser
from app.world import World
from tests.ranks import WORLD
from tests.sync.partitioned import PeakMemory, largest_parameter, on_two_ranks, partitioned

DEMANDED = 2.0
"""Most extra memory, in multiples of the largest parameter."""
SYNCS = 2
SETUPS = {"full fine-tuning": None, "LoRA, r=16": LoraSettings(r=16, lora_alpha=32)}


def measure(rank: int, folder: str, setup: str, failures: str) -> None:
    """Print the rows of one setup; leave a file in `failures` if the demand is not met."""
    model = load_policy(folder, "float32", "sdpa")
    largest = largest_parameter(model)
    settings = SETUPS[setup]
    if settings is None:
        part = torch.ones(largest // 4 // WORLD)
        with PeakMemory() as peak:
            dist.all_gather_into_tensor(torch.empty(largest // 4), part)
        report(rank, "one all_gather", peak, largest)
    else:
        add_adapters(model, settings)
    trainer = partitioned(model)  # kept: the model's hooks live in it
    rollout = TransformersEngine(device="cpu")
    rollout.start(folder, seed=0)
    synchroniser = WeightSynchroniser(rollout, World())
    synchroniser.sync(trainer.module, 0)
    for step in range(1, 1 + SYNCS):
        with PeakMemory() as peak:
            synchroniser.sync(trainer.module, step)
        report(rank, f"{setup}, sync {step}", peak, largest)
        if round(peak.bytes / largest, 2) > DEMANDED:
            Path(failures, setup).touch()


def report(rank: int, what: str, peak: PeakMemory, largest: int) -> None:
    """Print a row, once."""
    if rank == 0:
        print(f"{what:26s} {peak.seconds:7.2f} {peak.bytes / 1e6:14.1f} {peak.bytes / largest:12.3f}", flush=True)


if __name__ == "__main__":
    print(f"{'':26s} {'seconds':>7s} {'peak extra, MB':>14s} {'/ largest':>12s}")
    with tempfile.TemporaryDirectory() as scratch:
        failures = Path(scratch, "failures")
        failures.mkdir()
        for number, name in enumerate(SETUPS):
            on_two_ranks(measure, Path(scratch, f"store{number}"), sys.argv[1], name, str(failures))
        sys.exit(int(any(failures.iterdir())))
