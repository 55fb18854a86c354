"""vLLM that hangs, breaks, runs out of memory or of cache: detected, started anew, and the same rows in the end."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from app.engine import watchdog
from app.engine.errors import EngineError, EngineFailure
from app.engine.recovery import EngineRecovery
from app.engine.vllm.engine import VLLMEngine
from app.types import Completion, Request, SamplingConfig
from app.world import World
from tests.engine.clocks import StandingClock
from tests.faulty_engine import FaultyEngine, NarrowEngine, sleep
from tests.ranks import free_port, on_ranks
from tests.sync.tiny_model import VOCAB_SIZE, load_tiny, perturb, save_tiny

SETTINGS = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}
SAMPLING = SamplingConfig(max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@contextmanager
def running(engine: VLLMEngine, folder: Path) -> Iterator[VLLMEngine]:
    """The engine, with other weights than the folder's: those a resync must bring back."""
    pytest.importorskip("vllm")
    engine.start(str(folder), seed=0)
    resync(engine, folder)
    try:
        yield engine
    finally:
        engine.close()


def resync(engine: VLLMEngine, folder: Path) -> None:
    engine.load_weights(perturb(load_tiny(folder), seed=5).named_parameters(), policy_version=3)


class Sender:
    """Sends those weights after a restart."""

    def __init__(self, engine: VLLMEngine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder

    def send(self) -> None:
        resync(self.engine, self.folder)


def recovery(engine: VLLMEngine, folder: Path) -> EngineRecovery:
    made = EngineRecovery(engine, World())
    made.connect(Sender(engine, folder))
    return made


def requests(count: int = 16, length: int = 20) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(8, VOCAB_SIZE, (count, length), generator=generator).tolist()
    return [Request(token_ids=tuple(prompt), seed=100 + index) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[Completion]:
    with running(VLLMEngine(**SETTINGS), folder) as engine:
        return engine.generate(requests(), SAMPLING)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    """Equal tokens; log-probabilities to the rounding of another batch."""
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def resident() -> float:
    """MiB of memory that this process holds."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_time_out_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"data\.engine\.stall_timeout=.*: seconds above 0, or null"):
        VLLMEngine(stall_timeout=value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hang", r"vLLM made no progress for 600 s \(in sleep"),
        ("raise", "vLLM failed to generate: RuntimeError: broken"),
    ],
)
def test_a_broken_call_is_repeated_with_the_same_rows(
    folder: Path, undisturbed: list[Completion], fault: str, message: str
) -> None:
    with running(
        FaultyEngine(fault=fault, at_calls=(2, 3) if fault == "raise" else (2,), **SETTINGS), folder
    ) as engine:
        made = recovery(engine, folder)
        assert made.run(lambda: engine.generate(requests(), SAMPLING)) == undisturbed
        with pytest.warns(UserWarning, match=f"rank 0: {message}") as seen:
            assert made.run(lambda: engine.generate(requests(), SAMPLING)) == undisturbed
        assert sum("restart" in str(warning.message) for warning in seen) == made.restarts == len(engine.at_calls)
        assert engine.policy_version == 3


def test_an_engine_that_was_cut_off_says_so_until_it_is_restarted(folder: Path) -> None:
    with running(FaultyEngine(fault="hang", at_calls=(1,), **SETTINGS), folder) as engine:
        with pytest.raises(EngineFailure, match="no progress"):
            engine.generate(requests(), SAMPLING)
        with pytest.raises(EngineFailure, match="requests are still running"):
            engine.generate(requests(), SAMPLING)


@pytest.mark.slow
def test_restarts_free_the_old_engine(folder: Path) -> None:
    """Each holds a cache of 64 MiB beside its weights: of three that stayed, one would show."""
    broken = FaultyEngine(fault="hang", at_calls=range(1, 100), **SETTINGS)
    with running(broken, folder) as engine:
        held = []
        for number in range(5):
            engine.fault = [sleep, _raise][number % 2]
            with pytest.raises(EngineFailure):
                engine.generate(requests(), SAMPLING)
            runner = engine._runner()
            old = [weakref.ref(tensor) for tensor in (*runner.kv_caches, *runner.model.parameters())]
            assert sum(tensor().nbytes for tensor in old) > 64 << 20
            del runner
            engine.restart()
            assert engine.policy_version == -1
            resync(engine, folder)
            assert all(tensor() is None for tensor in old)
            held.append(resident())
    assert held[-1] - held[1] < 64


def _raise() -> None:
    raise RuntimeError("broken")


def test_steps_that_finish_are_progress_however_long_the_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, engine = StandingClock(), VLLMEngine(stall_timeout=3.0, **SETTINGS)
    with running(engine, folder):
        core = engine._started().llm_engine.engine_core

        def slow():
            clock.time += 2.0
            return type(core).get_output(core)

        core.get_output = slow
        monkeypatch.setattr(watchdog, "CLOCK", clock)
        assert len(engine.generate(requests(), SAMPLING)) == 16
        assert clock.time > 10 * 3.0


@pytest.mark.slow
def test_native_code_that_hangs_ends_the_process_with_one_line(folder: Path) -> None:
    pytest.importorskip("vllm")
    code = f"""if True:
        from tests.faulty_engine import FaultyEngine
        from tests.engine.test_vllm_failures import SAMPLING, SETTINGS, requests
        engine = FaultyEngine(fault="native", at_calls=(1,), **SETTINGS)
        engine.start({str(folder)!r}, 0)
        engine.generate(requests(), SAMPLING)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "no progress" in line]
    assert "rank 0: vLLM made no progress for 600 s and could not be interrupted for another 60 s" in line
    assert "(in lock_twice, " in line


def test_a_small_cache_gives_the_rows_of_a_large_one_and_one_warning(
    folder: Path, undisturbed: list[Completion]
) -> None:
    # One block is 32 tokens, keys and values, 2 layers, 2 heads of 32, 4 bytes: 32 KiB. 12 blocks for 16 requests of
    # up to 2 blocks each.
    small = SETTINGS | {"kv_cache_memory_bytes": 12 * (32 << 10)}
    with running(VLLMEngine(**small), folder) as engine:
        with pytest.warns(UserWarning, match=r"raise data\.engine\.kv_cache_memory_bytes, or lower .*max_num_seqs"):
            found = engine.generate(requests(), SAMPLING)
        assert_same(found, undisturbed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(engine.generate(requests(), SAMPLING), undisturbed)


def test_a_cache_too_small_for_one_sequence_names_the_key(folder: Path) -> None:
    pytest.importorskip("vllm")
    engine = VLLMEngine(**SETTINGS | {"kv_cache_memory_bytes": 2 * (32 << 10)})
    message = r"cannot hold one sequence of max_model_len \(128\): raise data\.engine\.kv_cache_memory_bytes \(65536\)"
    with pytest.raises(EngineError, match=message) as caught:
        engine.start(str(folder), seed=0)
    assert "\n" not in str(caught.value)


def test_out_of_memory_means_smaller_batches_and_the_same_rows(folder: Path, undisturbed: list[Completion]) -> None:
    with running(NarrowEngine(fits=5, **SETTINGS), folder) as engine:
        with pytest.warns(UserWarning, match="with 16 requests at once; from now on it samples in parts of 4"):
            found = engine.generate(requests(), SAMPLING)
        assert_same(found, undisturbed)
        assert engine.sizes == [16, 8, 4, 4, 4, 4]
        engine.fits = 0
        with pytest.raises(EngineError, match="one request alone needs more memory than there is: vLLM ran out of"):
            engine.generate(requests(), SAMPLING)
        engine.fits = 5
        assert_same(engine.generate(requests(), SAMPLING), undisturbed)


def _one_of_two_hangs(rank: int, folder: str, port: int) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    engine = FaultyEngine(fault="hang", at_calls=(2,), rank=1, **SETTINGS)
    with running(engine, Path(folder)):
        made = recovery(engine, Path(folder))
        first = made.run(lambda: engine.generate(requests(8 + rank), SAMPLING))
        assert made.run(lambda: engine.generate(requests(8 + rank), SAMPLING)) == first
        assert (made.restarts, engine.calls) == (1, 2 + rank), (made.restarts, engine.calls)
        # A new group needs all ranks to have made the same groups before.
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        assert total.item() == 3
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_recover_beside_their_process_group(folder: Path) -> None:
    pytest.importorskip("vllm")
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, or none")
    on_ranks(_one_of_two_hangs, str(folder), free_port())
