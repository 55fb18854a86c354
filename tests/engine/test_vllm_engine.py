"""VLLMEngine against transformers; the fast tests start no vLLM."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from app.engine.errors import EngineError
from app.engine.vllm.engine import VLLMEngine
from app.types import Completion, Request, SamplingConfig
from tests.sync.tiny_model import EOS_IDS, VOCAB_SIZE, load_tiny, perturb, save_tiny, score

MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[tuple[VLLMEngine, dict[str, bool]]]:
    """The engine, and what was as before after it had started."""
    pytest.importorskip("vllm")
    engine = VLLMEngine(dtype="float32", max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=64 << 20)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    engine.start(str(folder), seed=0)
    kept = {
        "random states": (random.random(), np.random.rand(), torch.rand(1)) == expected,
        "set_num_threads": torch.set_num_threads is set_num_threads,
        "threads": torch.get_num_threads() == threads,
    }
    yield engine, kept
    engine.close()
    engine.close()


@pytest.fixture
def engine(started: tuple[VLLMEngine, dict[str, bool]]) -> VLLMEngine:
    return started[0]


def _requests(count: int, length: int = 40) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(8, VOCAB_SIZE, (count, length), generator=generator).tolist()
    return [Request(token_ids=tuple(prompt), seed=100 + index) for index, prompt in enumerate(prompts)]


def _assert_logprobs(
    requests: list[Request], completions: list[Completion], model: torch.nn.Module, temperature: float = 1.0
) -> None:
    rows = [(request.token_ids, done.token_ids) for request, done in zip(requests, completions, strict=True)]
    for done, expected in zip(completions, score(model, rows, temperature), strict=True):
        assert done.logprobs == pytest.approx(expected, abs=1e-4)


def test_importing_the_module_imports_no_vllm() -> None:
    code = "import sys, app.engine.vllm.engine; sys.exit('vllm' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_constructing_refuses_arguments_it_owns() -> None:
    for name in ("model", "seed", "max_model_len", "logprobs_mode"):
        with pytest.raises(ValueError, match=rf"engine_args\.{name}"):
            VLLMEngine(engine_args={name: 1})
    with pytest.raises(ValueError, match="parallel sizes other than 1"):
        VLLMEngine(engine_args={"tensor_parallel_size": 2})


def test_an_unknown_dtype_is_refused_before_the_engine_starts() -> None:
    with pytest.raises(ValueError, match=r"data\.engine\.dtype='bf16' is unknown; choose one of auto, float32"):
        VLLMEngine(dtype="bf16")


def test_an_old_vllm_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("vllm")
    old.__version__ = "0.10.1.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", old)
    with pytest.raises(EngineError, match=r"vLLM 0\.10\.1\.1 is too old: at least 0\.10\.2 .*processed_logprobs"):
        VLLMEngine().start("anything", seed=0)


def test_a_missing_vllm_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="install vllm"):
        VLLMEngine().start("anything", seed=0)


def test_not_started_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="call start first"):
        VLLMEngine().generate([], SamplingConfig())
    VLLMEngine().close()


def test_starting_leaves_random_states_and_threads_alone(started: tuple[VLLMEngine, dict[str, bool]]) -> None:
    assert started[1] == {"random states": True, "set_num_threads": True, "threads": True}


def test_a_second_engine_in_the_process_is_refused(engine: VLLMEngine, folder: Path) -> None:
    with pytest.raises(EngineError, match="close it first"):
        VLLMEngine().start(str(folder), seed=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(engine: VLLMEngine, folder: Path, temperature: float) -> None:
    requests = _requests(16)
    completions = engine.generate(requests, SamplingConfig(temperature=temperature, max_tokens=24))
    _assert_logprobs(requests, completions, load_tiny(folder), temperature)
    assert len({done.token_ids for done in completions}) == 16


def test_more_prompt_tokens_than_a_step_takes(engine: VLLMEngine, folder: Path) -> None:
    """On a CPU vLLM cannot cut a prompt of a seeded request in two at the 4096 tokens of a step."""
    requests = _requests(70, length=101)
    completions = engine.generate(requests, SamplingConfig(max_tokens=2))
    _assert_logprobs(requests, completions, load_tiny(folder))


def test_greedy_takes_the_likeliest_token(engine: VLLMEngine, folder: Path) -> None:
    requests = _requests(2)
    completions = engine.generate(requests, SamplingConfig(temperature=0.0, max_tokens=6))
    _assert_logprobs(requests, completions, load_tiny(folder))
    model = load_tiny(folder)
    for request, done in zip(requests, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*request.token_ids, *done.token_ids]])).logits[0]
        assert done.token_ids == tuple(logits[len(request.token_ids) - 1 : -1].argmax(-1).tolist())


def test_every_end_token_ends_a_completion_and_belongs_to_it(engine: VLLMEngine) -> None:
    requests = [Request(token_ids=(9, 10), seed=seed) for seed in range(192)]
    completions = engine.generate(requests, SamplingConfig(max_tokens=40))
    assert {done.token_ids[-1] for done in completions if done.finish_reason == "stop"} == set(EOS_IDS)
    for done in completions:
        assert not set(done.token_ids[:-1]) & set(EOS_IDS)
        assert (done.token_ids[-1] in EOS_IDS) == (done.finish_reason == "stop")
        assert done.finish_reason == "stop" or len(done.token_ids) == 40


def test_calls_do_not_depend_on_history(engine: VLLMEngine) -> None:
    requests, sampling = _requests(8), SamplingConfig(max_tokens=16)
    first = engine.generate(requests, sampling)
    engine.generate(_requests(3, length=70), sampling)
    assert engine.generate(requests, sampling) == first


def test_a_seed_of_any_size_is_a_seed(engine: VLLMEngine) -> None:
    for seed in (-1, 2**63 - 1, 2**70):
        request = Request(token_ids=(9, 10), seed=seed)
        sampling = SamplingConfig(max_tokens=8)
        assert engine.generate([request], sampling) == engine.generate([request], sampling)


def test_the_context_cuts_with_reason_length(engine: VLLMEngine) -> None:
    (done,) = engine.generate([Request(token_ids=(9,) * (MAX_MODEL_LEN - 4), seed=1)], SamplingConfig(max_tokens=50))
    assert (len(done.token_ids), done.finish_reason) == (4, "length")


@pytest.mark.parametrize("prompt", [(), (9,) * MAX_MODEL_LEN, (VOCAB_SIZE,), (-1,)])
def test_a_bad_row_is_named_and_the_engine_goes_on(engine: VLLMEngine, prompt: tuple[int, ...]) -> None:
    requests = [*_requests(2), Request(token_ids=prompt, seed=0)]
    with pytest.raises(ValueError, match="request 2: "):
        engine.generate(requests, SamplingConfig(max_tokens=4))
    assert len(engine.generate(requests[:2], SamplingConfig(max_tokens=4))) == 2


def test_a_temperature_that_vllm_would_change_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match=r"temperature=0\.001: vLLM would silently use 0\.01"):
        engine.generate(_requests(1), SamplingConfig(temperature=0.001))


def test_the_engine_survives_an_exception_inside_vllm(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, sampling = _requests(4), SamplingConfig(max_tokens=8)
    before = engine.generate(requests, sampling)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner().model, "forward", broken)
        with pytest.raises(EngineError, match="vLLM failed to generate: RuntimeError: out of luck"):
            engine.generate(requests, sampling)
    assert engine.generate(requests, sampling) == before


def test_nan_weights_are_an_error_and_good_ones_heal(engine: VLLMEngine, folder: Path) -> None:
    requests, sampling = _requests(4), SamplingConfig(max_tokens=8)
    model = load_tiny(folder)
    broken = load_tiny(folder)
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight[0, 0] = float("nan")
    engine.load_weights(broken.named_parameters(), policy_version=1)
    with pytest.raises(EngineError, match="request 0: vLLM's log-probabilities are NaN"):
        engine.generate(requests, sampling)
    engine.load_weights(model.named_parameters(), policy_version=2)
    _assert_logprobs(requests, engine.generate(requests, sampling), model)


def test_new_weights_are_sampled_from(engine: VLLMEngine, folder: Path) -> None:
    requests, sampling = _requests(8), SamplingConfig(max_tokens=16)
    model = perturb(load_tiny(folder), seed=5)
    before = engine.generate(requests, sampling)
    engine.load_weights(model.named_parameters(), policy_version=3)
    assert engine.policy_version == 3
    after = engine.generate(requests, sampling)
    assert after != before
    _assert_logprobs(requests, after, model)
    engine.load_weights(load_tiny(folder).named_parameters(), policy_version=0)
    assert engine.generate(requests, sampling) == before
