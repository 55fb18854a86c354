"""Two gloo processes: every rank's result equals the function on all ranks' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import distributed

from app.metrics import MismatchMetrics, RunningStatistics, diagnose, fused_sync
from tests.metrics.reference import assert_same
from tests.metrics.test_mismatch_metrics import CONFIG, COUNT, inputs, part
from tests.ranks import on_ranks

# Rank 0 has two updates of 1 and 9 rows, rank 1 one update of 6 rows, each with its own width.
SPLITS = ((slice(0, 1), slice(1, 10)), (slice(10, COUNT),))


def fused(rank: int, running: RunningStatistics) -> dict[str, object]:
    """Two metrics and the histograms in one context: count the collectives, and look at the states before and after."""
    metrics = MismatchMetrics(CONFIG)
    for rows in SPLITS[rank]:
        metrics.update(**part(inputs(), rows))
    together = [*metrics.members(), running]
    local = [metric.vector for metric in together]
    with count_collectives() as calls, fused_sync(together):
        found = {**metrics.compute(), **running.compute()}
        with fused_sync(together):
            nested = metrics.compute()
        histograms = metrics.histograms()
        try:
            metrics.update(**inputs())
            refused = False
        except RuntimeError:
            refused = True
    restored = all(metric.vector is vector for metric, vector in zip(together, local, strict=True))
    return {
        "fused": found,
        "nested equal": {key: found[key] for key in nested} == nested,
        "fused calls": list(calls),
        "update refused": refused,
        "local states are back": restored and not any(metric._is_synced for metric in together),
        "is_weight": histograms["rollout_correction/is_weight"].total,
        "error leaves the local state": leaves_the_local_state_after_an_error(running),
        "own sync": running.compute(),  # a metric alone still syncs by itself
    }


@contextmanager
def count_collectives() -> Iterator[list[str]]:
    """Names of the collectives called."""
    names = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast")
    calls: list[str] = []

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(distributed, name, counted(name, getattr(distributed, name))))
        yield calls


def leaves_the_local_state_after_an_error(running: RunningStatistics) -> bool:
    before = running.vector
    try:
        with fused_sync([running]):
            raise RuntimeError
    except RuntimeError:
        return running.vector is before and not running._is_synced


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
    with fused_sync(one_sided.members()):
        saved = {key: value.clone() for key, value in one_sided.state_dict().items()}
    resumed = MismatchMetrics(CONFIG)
    if rank == 0:
        resumed.load_state_dict(saved)
    results["resumed"] = resumed.compute()

    running = RunningStatistics(ratios=["clip"], spreads=["reward"], maxima=["longest"], minima=["shortest"])
    running.update(
        ratios={"clip": (float(rank), 4)},
        spreads={"reward": torch.tensor([1.0, 2.0, 6.0][rank:])},
        maxima={"longest": torch.tensor([5, 9 + rank])},
        minima={"shortest": 3 - rank},
    )
    results["running"] = running.compute()
    results |= fused(rank, running)
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_ranks_equal_the_concatenation(tmp_path: Path) -> None:
    on_ranks(run_rank, str(tmp_path))
    wanted = diagnose(**inputs(), config=CONFIG)
    more = {name: torch.cat([value, value[:2]]) for name, value in inputs().items()}
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt")
        for name in ("split", "one rank without rows", "resumed"):
            assert_same(results[name], wanted)
        assert_same(results["one row more on each"], diagnose(**more, config=CONFIG))
        running = results["running"]
        assert_same(results["fused"], wanted | running)
        assert results["fused calls"] == ["all_gather"]
        assert results["own sync"] == running
        for name in ("nested equal", "update refused", "local states are back", "error leaves the local state"):
            assert results[name], name
        assert results["is_weight"] == int((inputs()["mask"] & inputs()["rollout_logprobs"].isfinite()).sum())
        # rewards of both ranks: 1, 2, 6, 2, 6
        assert results["running"] == {
            "clip": 1 / 8,
            "reward_mean": 17 / 5,
            "reward_std": (81 / 5 - (17 / 5) ** 2) ** 0.5,
            "longest": 10.0,
            "shortest": 2.0,
        }
