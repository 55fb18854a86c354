"""MismatchGuard and AdaptiveThreshold on two processes: what they see is of all ranks, what they change is alike."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from app.guards.rules import Rule
from app.types import Completion, Request, SamplingConfig
from app.world import World
from callbacks.adaptive_threshold import AdaptiveThreshold
from callbacks.mismatch_guard import MismatchGuard
from tests.callbacks.test_mismatch_guard import fit
from tests.conftest import FakeEngine
from tests.ranks import WORLD, free_port, on_ranks
from tests.training.split_run import strategy_of
from tests.training.test_module import NearEngine
from tests.training.tiny_runs import join

STRATEGIES = ("ddp", "deepspeed_cpu_stage_3")
CUT = 7
"""Micro-batches before the checkpoint: in the middle of the fourth step's accumulation window."""
WINDOW_START = 6
"""Where a run goes on from there: a window is done again from its first micro-batch."""


class FarOnTheLastRank(NearEngine):
    """An engine near the trainer's policy, but far from it on the last rank."""

    def _complete(self, request: Request, sampling: SamplingConfig) -> Completion:
        last = World().rank == World().size - 1
        return FakeEngine._complete(self, request, sampling) if last else super()._complete(request, sampling)


def run(model: str, folder: Path, strategy: str, **settings: Any) -> dict[str, Any]:
    """Train on two ranks; the rule is beyond what rank 0 alone sees (about 0.08), not the mean."""
    rule = Rule(metric="k3_kl", above=0.3, patience=2, keep=True, name="rule",
                actions=["warn", "log_rows", "correct", "lower_learning_rate"])  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    found = fit(
        model,
        folder,
        MismatchGuard([rule], rows=2),
        AdaptiveThreshold(target=0.9, every_n_values=1),
        engine=FarOnTheLastRank(),
        devices=WORLD,
        strategy=strategy_of(strategy),
        **settings,
    )
    watch = found.pop("watch")
    return found | {"changed": {"levels": watch.levels, "uppers": watch.uppers, "rates": watch.rates}}


def worker(rank: int, model: str, folder: Path, port: int) -> None:
    """Train as one of two processes, whole and from the checkpoint inside it."""
    join(rank, port)
    for strategy in STRATEGIES:
        checkpoint, own = folder / f"{strategy}.ckpt", folder / strategy / str(rank)
        whole = run(model, own, strategy, stops={CUT: checkpoint})
        resumed = run(model, own, strategy, start=checkpoint)
        torch.save({"whole": whole, "resumed": resumed}, folder / f"{strategy}-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs wrote."""
    path = tmp_path_factory.mktemp("ranks")
    on_ranks(worker, tiny_model, path, free_port())
    return path


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_ranks_change_the_same_at_the_same_step(folder: Path, strategy: str) -> None:
    first, last = (torch.load(folder / f"{strategy}-{rank}.pt")["whole"]["changed"] for rank in range(WORLD))
    assert first == last
    assert first["levels"] == ["none"] * 4 + ["token"] * 8
    assert first["rates"] == pytest.approx([1e-3] * 4 + [5e-4] * 8)
    assert len(set(first["uppers"][4:])) > 1, "the threshold never moved"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_goes_on_is_the_run_that_was_never_cut(folder: Path, strategy: str) -> None:
    for rank in range(WORLD):
        found = torch.load(folder / f"{strategy}-{rank}.pt")
        whole, resumed = found["whole"], found["resumed"]
        assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())
        assert resumed["changed"] == {name: values[WINDOW_START:] for name, values in whole["changed"].items()}
        assert all(whole["logged"][step] == values for step, values in resumed["logged"].items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_worst_rows_of_all_ranks_are_written_once(folder: Path, strategy: str) -> None:
    paths = sorted((folder / strategy).rglob("mismatch_guard_rows.csv"))
    assert len(paths) == 1
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows} == {"2"}
    assert {row["rank"] for row in rows} == {"1"}  # the rank whose engine is far off
