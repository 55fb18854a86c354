"""Engines that need a start of their own: packed layers, another dtype, an untied head, quantisation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from app.engine.errors import EngineError
from app.engine.vllm import engine as vllm_engine
from app.engine.vllm.engine import VLLMEngine
from app.sync.verify import SyncError, compare
from app.types import Request, SamplingConfig
from tests.sync.tiny_model import expected, load_tiny, perturb, save_tiny, save_tiny_experts, score, synchroniser_of

pytest.importorskip("vllm")

Start = Callable[..., VLLMEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[VLLMEngine] = []

    def start_one(folder: Path, dtype: str = "float32", quantization: str | None = None) -> VLLMEngine:
        engine = VLLMEngine(dtype=dtype, max_model_len=128, kv_cache_memory_bytes=32 << 20, quantization=quantization)
        engine.start(str(folder), seed=0)
        engines.append(engine)
        return engine

    yield start_one
    for engine in engines:
        engine.close()


def test_reload_weights_over_packed_layers_leaves_the_tied_head_stale(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own reload on a CPU, with oneDNN packing left on: the fault that all this is here for."""
    if torch.cuda.is_available():
        pytest.skip("vLLM packs weights on a CPU only")
    monkeypatch.setattr(vllm_engine, "plain_cpu_layers", contextlib.nullcontext)
    folder = save_tiny(tmp_path / "tied")
    engine, model = start(folder), perturb(load_tiny(folder), seed=1)
    compare(expected(load_tiny(folder)), engine.checksums())
    with pytest.raises(EngineError, match=r"vLLM packed the weights of model.layers.0.self_attn.q_proj.weight"):
        engine.load_weights(model.named_parameters(), policy_version=1)
    reload = {"weights_iterator": iter(model.named_parameters()), "is_checkpoint_format": True}
    engine._llm.collective_rpc("reload_weights", kwargs=reload)
    with pytest.raises(SyncError, match=r"different bits in 1 of \d+ parameters: lm_head.weight"):
        compare(expected(model), engine.checksums())


def test_a_bfloat16_engine_holds_the_cast_weights_of_an_untied_model(start: Start, tmp_path: Path) -> None:
    untied = save_tiny(tmp_path / "untied", tie=False)
    engine, model = start(untied, dtype="bfloat16"), perturb(load_tiny(untied), seed=1)
    report = synchroniser_of(engine, verify="logprobs").sync(model, 1, partial(score, model))
    assert report.bytes == sum(parameter.numel() * 2 for parameter in model.parameters())
    assert engine.checksums() == expected(model, torch.bfloat16)
    stale = dict(load_tiny(untied).named_parameters())["lm_head.weight"]
    engine.load_weights([(n, stale if n == "lm_head.weight" else p) for n, p in model.named_parameters()], 2)
    with pytest.raises(SyncError, match=r"different bits in 1 of \d+ parameters: lm_head.weight"):
        compare(expected(model, torch.bfloat16), engine.checksums())


def test_fused_experts_have_no_checksum_so_the_canary_vouches(start: Start, tmp_path: Path) -> None:
    folder = save_tiny_experts(tmp_path / "experts")
    engine = start(folder)
    model = perturb(Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32), seed=1)
    assert engine.weight_layout().opaque == ("model.layers.0.mlp.experts.", "model.layers.1.mlp.experts.")
    with pytest.raises(SyncError, match="needs a scorer for"):
        synchroniser_of(engine).sync(model, 1)
    report = synchroniser_of(engine).sync(model, 1, partial(score, model))
    assert report.canary is not None
    assert report.canary.mean_abs_diff < 1e-5
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj += 0.1
    engine.load_weights = lambda weights, version: None  # type: ignore[method-assign, assignment]
    with pytest.raises(SyncError, match="canary"):
        synchroniser_of(engine).sync(model, 2, partial(score, model))


def test_a_quantised_engine_samples_but_cannot_be_synced(start: Start, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a quantisation for the CPU")
    folder = save_tiny(tmp_path / "tied")
    engine, model = start(folder, dtype="bfloat16", quantization="fp8_per_channel"), load_tiny(folder)
    (done,) = engine.generate([Request(token_ids=(9, 10), seed=1)], SamplingConfig(max_tokens=4))
    assert done.logprobs is not None
    layout = engine.weight_layout()
    assert layout.lossy
    assert layout.is_opaque("model.layers.0.self_attn.k_proj.weight")
    assert not layout.is_opaque("model.norm.weight")
    with pytest.raises(EngineError, match="quantised weights cannot be replaced in place"):
        synchroniser_of(engine).sync(model, 1, partial(score, model))
