"""Two gloo processes: every rank's result equals the function on all ranks' rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed, multiprocessing

from app.metrics import MismatchMetrics, RunningStatistics, diagnose
from tests.metrics.reference import assert_same
from tests.metrics.test_mismatch_metrics import CONFIG, COUNT, inputs, part, without_positions

# Rank 0 has two updates of 1 and 9 rows, rank 1 one update of 6 rows, each with its own width.
SPLITS = ((slice(0, 1), slice(1, 10)), (slice(10, COUNT),))


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    metrics = MismatchMetrics(CONFIG)
    for rows in SPLITS[rank]:
        metrics.update(**part(inputs(), rows))
    results: dict[str, object] = {"split": metrics.compute()}
    metrics.update(**part(inputs(), slice(rank, rank + 1)))
    results["one row more on each"] = metrics.compute()

    one_sided = MismatchMetrics(CONFIG)
    if rank == 0:
        one_sided.update(**inputs())
    results["one rank without rows"] = one_sided.compute()

    # A checkpoint holds one rank's state: taken synced, it is the window of all ranks; the others start empty.
    with one_sided["MismatchMetric"].sync_context():
        saved = {key: value.clone() for key, value in one_sided.state_dict().items() if "MismatchMetric" in key}
    resumed = MismatchMetrics(CONFIG)
    if rank == 0:
        resumed.load_state_dict(saved, strict=False)
    results["resumed"] = resumed.compute()

    running = RunningStatistics(ratios=["clip"], spreads=["reward"], maxima=["longest"], minima=["shortest"])
    running.update(
        ratios={"clip": (float(rank), 4)},
        spreads={"reward": torch.tensor([1.0, 2.0, 6.0][rank:])},
        maxima={"longest": torch.tensor([5, 9 + rank])},
        minima={"shortest": 3 - rank},
    )
    results["running"] = running.compute()
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_ranks_equal_the_concatenation(tmp_path: Path) -> None:
    multiprocessing.spawn(run_rank, args=(str(tmp_path),), nprocs=2)
    wanted = diagnose(**inputs(), config=CONFIG)
    more = {name: torch.cat([value, value[:2]]) for name, value in inputs().items()}
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt")
        for name in ("split", "one rank without rows", "resumed"):
            assert_same(without_positions(results[name]), wanted)
        assert_same(without_positions(results["one row more on each"]), diagnose(**more, config=CONFIG))
        # rewards of both ranks: 1, 2, 6, 2, 6
        assert results["running"] == {
            "clip": 1 / 8,
            "reward_mean": 17 / 5,
            "reward_std": (81 / 5 - (17 / 5) ** 2) ** 0.5,
            "longest": 10.0,
            "shortest": 2.0,
        }
