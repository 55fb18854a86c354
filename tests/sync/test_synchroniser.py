"""The synchroniser over the transformers engine: the same faults as with vLLM, quickly."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.dashboard.keys import find
from app.engine.errors import EngineError, EngineFailure
from app.engine.transformers_engine import TransformersEngine
from app.engine.weight_layout import WeightLayout
from app.sync import peak_memory
from app.sync.canary import CanaryReport
from app.sync.synchroniser import SyncReport, WeightSynchroniser
from app.sync.verify import SyncError
from app.types import Request, SamplingConfig
from app.world import World
from tests.ranks import on_ranks
from tests.sync.tiny_model import load_tiny, perturb, save_tiny, score, synchroniser_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def _started(folder: Path, engine: TransformersEngine | None = None) -> TransformersEngine:
    engine = engine or TransformersEngine(device="cpu")
    engine.start(str(folder), seed=0)
    return engine


def test_reports_bytes_and_sets_the_version(folder: Path) -> None:
    model = perturb(load_tiny(folder), seed=1)
    engine = _started(folder)
    report = synchroniser_of(engine, verify="logprobs").sync(model, 7, partial(score, model))
    assert engine.policy_version == 7
    assert report.bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert report.canary is not None
    assert report.canary.mean_abs_diff < 1e-5


def test_metrics_are_times_speed_memory_and_canary() -> None:
    report = SyncReport(
        seconds=0.5, verify_seconds=0.25, bytes=10**9, peak_growth_bytes=3_000_000,
        canary=CanaryReport(mean_abs_diff=1e-6, max_abs_diff=1e-5, tokens=4),
    )  # fmt: skip
    assert report.metrics == {
        "weight_sync/seconds": 0.5,
        "weight_sync/verify_seconds": 0.25,
        "weight_sync/gigabytes_per_second": 2.0,
        "weight_sync/peak_memory_growth_megabytes": 3.0,
        "weight_sync/canary_abs_diff_mean": 1e-6,
    }
    assert all(find(key) is not None for key in report.metrics)
    unknown = dataclasses.replace(report, peak_growth_bytes=None, canary=None).metrics
    assert sorted(unknown) == ["weight_sync/gigabytes_per_second", "weight_sync/seconds", "weight_sync/verify_seconds"]


class Hoarding(TransformersEngine):
    """Raises the mark of the highest memory use while it writes."""

    status: Path

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        super().load_weights(weights, policy_version)
        self.status.write_text("VmPeak:\t    9999 kB\nVmHWM:\t    5000 kB\nVmRSS:\t    1000 kB\n")


def test_memory_above_the_processs_highest_is_counted_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _started(folder, Hoarding(device="cpu"))
    engine.status = tmp_path / "status"
    engine.status.write_text("VmPeak:\t    9999 kB\nVmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\n")
    monkeypatch.setattr(peak_memory, "STATUS", engine.status)
    synchroniser = synchroniser_of(engine)
    growth = [synchroniser.sync(load_tiny(folder), step).peak_growth_bytes for step in range(2)]
    assert growth == [3000 * 1024, 0]


def test_what_the_system_says_it_held_at_once() -> None:
    """256 MiB in a new process, twice, given back in between: its mark rises by about as much, and once."""
    code = """if True:
        import torch
        from app.sync.peak_memory import peak_bytes
        marks = [peak_bytes(torch.device("cpu"))]
        for _ in range(2):
            held = torch.ones(1 << 26)
            marks.append(peak_bytes(torch.device("cpu")))
            del held
        print(*marks)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, first, second = map(int, done.stdout.split())
    assert 128 << 20 < first - before < 384 << 20
    assert 0 <= second - first < 128 << 20


def test_where_the_system_does_not_say_nothing_is_known() -> None:
    assert peak_memory.peak_bytes(torch.device("meta")) is None


def test_checksums_hold_across_dtypes(folder: Path) -> None:
    engine = _started(folder, TransformersEngine(dtype="bfloat16", device="cpu"))
    synchroniser_of(engine).sync(perturb(load_tiny(folder), seed=1), 1)
    assert engine.weight_layout().dtypes["model.norm.weight"] == torch.bfloat16


class Skipping(TransformersEngine):
    """Writes all weights but one, and says nothing."""

    skipped = "model.layers.1.self_attn.k_proj.weight"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        old = dict(self._model.named_parameters())[self.skipped].clone()
        super().load_weights(((n, old if n == self.skipped else t) for n, t in weights), policy_version)


class Deaf(TransformersEngine):
    """Takes the weights and drops them."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        for _ in weights:
            pass


def test_a_skipped_parameter_is_caught_by_name(folder: Path) -> None:
    engine = _started(folder, Skipping(device="cpu"))
    with pytest.raises(SyncError, match=r"different bits in 1 of \d+ parameters: model.layers.1.self_attn.k_proj"):
        synchroniser_of(engine).sync(perturb(load_tiny(folder), seed=1), 1)


def test_a_skipped_sync_is_caught_by_checksum_and_by_canary(folder: Path) -> None:
    engine, model = _started(folder, Deaf(device="cpu")), perturb(load_tiny(folder), seed=1)
    with pytest.raises(SyncError, match=r"different bits in (\d+) of \1 parameters"):
        synchroniser_of(engine).sync(model, 1)
    engine.checksums = dict  # type: ignore[method-assign]
    engine.weight_layout = partial(_all_opaque, engine)  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="canary: log-probabilities of engine and trainer are"):
        synchroniser_of(engine).sync(model, 1, partial(score, model))


def _all_opaque(engine: TransformersEngine) -> WeightLayout:
    layout = TransformersEngine.weight_layout(engine)
    return dataclasses.replace(layout, shapes={}, dtypes={"any": torch.float32}, opaque=("model.",))


def test_opaque_weights_without_a_scorer_are_refused(folder: Path) -> None:
    engine = _started(folder)
    engine.weight_layout = partial(_all_opaque, engine)  # type: ignore[method-assign]
    with pytest.raises(SyncError, match=r"needs a scorer for \['model\.'\]"):
        synchroniser_of(engine).sync(load_tiny(folder), 1)


def test_a_canary_without_requests_is_refused_before_anything_is_written(folder: Path) -> None:
    engine, model = _started(folder), load_tiny(folder)
    with pytest.raises(SyncError, match="verify='checksum' needs requests for the canary"):
        WeightSynchroniser(engine, World()).sync(model, 1, partial(score, model))
    assert engine.policy_version == -1


def test_nothing_is_written_if_a_shape_is_wrong(folder: Path) -> None:
    engine, model = _started(folder), perturb(load_tiny(folder), seed=1)
    before = engine.checksums()
    model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(EngineError, match=r"model.norm.weight of shape \[3\], the engine has \[128\]"):
        synchroniser_of(engine).sync(model, 1)
    assert engine.checksums() == before
    assert engine.policy_version == -1


def test_the_canary_runs_every_so_often(folder: Path) -> None:
    engine, model = _started(folder), load_tiny(folder)
    synchroniser = synchroniser_of(engine, verify="checksum", canary_every=2)
    ran = [synchroniser.sync(model, step, partial(score, model)).canary is not None for step in range(3)]
    assert ran == [True, False, True]


def test_a_failed_load_drains_the_gathering_and_blocks_sampling(folder: Path) -> None:
    engine, model = _started(folder), load_tiny(folder)
    names: list[str] = []
    original = engine.load_weights

    def failing(weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        def broken() -> Iterator[tuple[str, Tensor]]:
            for number, (name, tensor) in enumerate(weights):
                names.append(name)
                yield (name, tensor[:1]) if number == 1 else (name, tensor)

        try:
            original(broken(), policy_version)
        finally:
            names.extend(name for name, _ in weights)

    engine.load_weights = failing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="of shape"):
        synchroniser_of(engine).sync(model, 1)
    assert names == [name for name, _ in model.named_parameters()]
    with pytest.raises(EngineError, match="send the full set"):
        engine.generate([Request(token_ids=(3,), seed=0)], SamplingConfig(max_tokens=1))
    engine.load_weights = original  # type: ignore[method-assign]
    synchroniser_of(engine).sync(model, 2)
    assert len(engine.generate([Request(token_ids=(3,), seed=0)], SamplingConfig(max_tokens=1))) == 1


class Broken(TransformersEngine):
    """Raises an error instead of taking the weights, if it has one."""

    error: Exception | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        if self.error is not None:
            raise self.error
        super().load_weights(weights, policy_version)


def _one_rank_fails(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    engine = _started(Path(folder), Broken(device="cpu"))
    model, synchroniser = load_tiny(Path(folder)), synchroniser_of(engine)
    engine.error = EngineError("broken here") if rank == 1 else None
    expected = (EngineError, "broken here") if rank == 1 else (SyncError, "rank 1 failed: EngineError: broken here")
    with pytest.raises(expected[0], match=expected[1]):
        synchroniser.sync(model, 1)
    engine.error = EngineFailure("died here") if rank == 1 else None
    message = "died here" if rank == 1 else "rank 1 failed: EngineFailure: died here"
    with pytest.raises(EngineFailure, match=f"^{message}$"):  # all ranks must start their engines anew
        synchroniser.sync(model, 1)
    engine.error = None
    assert synchroniser.sync(model, 1, partial(score, model)).canary is not None
    dist.destroy_process_group()


def test_all_ranks_fail_together(tmp_path: Path, folder: Path) -> None:
    on_ranks(_one_rank_fails, str(tmp_path / "store"), str(folder))
