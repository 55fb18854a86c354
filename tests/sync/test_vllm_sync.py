"""Syncs into the real vLLM, broken on purpose: each fault must be caught by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from app.engine.errors import EngineError
from app.engine.vllm.engine import VLLMEngine
from app.policy.lora import LoraSettings, add_adapters
from app.sync.canary import compare_logprobs, mean_tolerance, scored_rows
from app.sync.synchroniser import CANARY_SAMPLING
from app.sync.verify import SyncError, compare
from app.types import Request, SamplingConfig
from app.weights.checksum import checksum
from app.weights.gather import full_shapes, named_full_parameters
from tests.sync.tiny_model import expected, load_tiny, perturb, random_requests, save_tiny, score, synchroniser_of

pytest.importorskip("vllm")

TOLERANCE = mean_tolerance(torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(dtype="float32", max_model_len=128, kv_cache_memory_bytes=32 << 20)
    engine.start(str(folder), seed=0)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: VLLMEngine, folder: Path) -> VLLMEngine:
    shared.load_weights(load_tiny(folder).named_parameters(), policy_version=0)
    return shared


def _canary(engine: VLLMEngine, model: torch.nn.Module) -> float:
    requests = random_requests()
    completions = engine.generate(requests, CANARY_SAMPLING)
    return compare_logprobs(completions, score(model, scored_rows(requests, completions)), TOLERANCE).mean_abs_diff


def test_the_engine_expects_what_the_trainer_has(engine: VLLMEngine, folder: Path) -> None:
    model = load_tiny(folder)
    layout = engine.weight_layout()
    assert layout.shapes == full_shapes(model)
    assert set(layout.dtypes.values()) == {torch.float32}
    assert (layout.opaque, layout.lossy) == ((), False)
    compare(expected(model), engine.checksums())
    assert "lm_head.weight" in engine.checksums()


def test_a_good_sync_passes_checksums_and_canary(engine: VLLMEngine, folder: Path) -> None:
    model = perturb(load_tiny(folder), seed=1)
    report = synchroniser_of(engine, verify="logprobs").sync(model, 1, partial(score, model))
    assert report.canary is not None
    assert report.canary.mean_abs_diff < 1e-5


def test_adapters_arrive_merged(engine: VLLMEngine, folder: Path) -> None:
    """Also in vLLM's fused layers; the trainer computes W x + s B A x, the engine (W + s B A) x."""
    model = load_tiny(folder)
    add_adapters(model, LoraSettings(r=4, lora_alpha=8))
    perturb(model, seed=1)  # the base too: whatever it is, it stays
    before = {name: checksum(parameter) for name, parameter in model.named_parameters()}
    synchroniser = synchroniser_of(engine, verify="logprobs")
    for step in (1, 2):
        report = synchroniser.sync(model, step, partial(score, model))
        assert report.canary is not None
        assert report.canary.mean_abs_diff < 1e-5
    assert {name: checksum(parameter) for name, parameter in model.named_parameters()} == before
    model.model.layers[1].mlp.up_proj.lora_B.default.weight.data.mul_(1.01)
    sums = {name: checksum(tensor) for name, tensor in named_full_parameters(model)}
    with pytest.raises(SyncError, match=r"different bits in 1 of \d+ parameters: model.layers.1.mlp.up_proj.weight"):
        compare(sums | {"lm_head.weight": sums["model.embed_tokens.weight"]}, engine.checksums())


def test_a_skipped_sync_is_caught(engine: VLLMEngine, folder: Path) -> None:
    model = perturb(load_tiny(folder), seed=1)
    with pytest.raises(SyncError, match=r"different bits in (\d+) of \1 parameters"):
        compare(expected(model), engine.checksums())
    with pytest.raises(SyncError, match="canary"):
        _canary(engine, model)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
    ],
)
def test_one_stale_parameter_is_caught_by_name(engine: VLLMEngine, folder: Path, name: str) -> None:
    model, old = perturb(load_tiny(folder), seed=1), dict(load_tiny(folder).named_parameters())[name]
    sent = [(each, old if each == name else tensor) for each, tensor in model.named_parameters()]
    engine.load_weights(sent, policy_version=1)
    tied = {name, "lm_head.weight"} if name == "model.embed_tokens.weight" else {name}
    wanted, actual = expected(model), engine.checksums()
    assert {each for each in wanted if wanted[each] != actual[each]} == tied
    with pytest.raises(SyncError, match=rf"different bits in {len(tied)} of .*: {name}"):
        compare(wanted, actual)


def test_a_stale_copy_of_the_tied_head_is_caught_by_name(engine: VLLMEngine, folder: Path) -> None:
    model, head = perturb(load_tiny(folder), seed=1), engine._model().lm_head
    tied = head.weight
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    with pytest.raises(SyncError, match=r"different bits in 1 of \d+ parameters: lm_head.weight"):
        synchroniser_of(engine).sync(model, 1)
    with pytest.raises(SyncError, match="canary"):
        _canary(engine, model)
    head.weight = tied


def test_a_misfit_is_refused_before_anything_is_written(engine: VLLMEngine, folder: Path) -> None:
    model = perturb(load_tiny(folder), seed=1)
    before = engine.checksums()
    model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    model.register_parameter("value_head", torch.nn.Parameter(torch.ones(2)))
    del model.model.layers[1].mlp.down_proj
    with pytest.raises(
        EngineError, match=r"missing model.layers.1.mlp.down_proj.weight.*unexpected value_head.*norm.weight of shape"
    ):
        synchroniser_of(engine).sync(model, 1)
    assert engine.checksums() == before
    assert engine.policy_version == 0


def test_half_written_weights_are_never_sampled_from(engine: VLLMEngine, folder: Path) -> None:
    model = perturb(load_tiny(folder), seed=1)
    requests, sampling = [Request(token_ids=(9, 10), seed=1)], SamplingConfig(max_tokens=2)
    with pytest.raises(EngineError, match=r"missing model\.norm\.weight"):
        engine.load_weights([w for w in model.named_parameters() if w[0] != "model.norm.weight"], 1)
    with pytest.raises(EngineError, match="send the full set"):
        engine.generate(requests, sampling)
    engine.load_weights(model.named_parameters(), 1)
    assert len(engine.generate(requests, sampling)) == 1
    compare(expected(model), engine.checksums())
