"""Decoding by real vLLM where it is hard, and every plant: present where it should be and cured by what cures it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from app.types import Decoding, Request, SamplingConfig
from app.weights.checksum import checksum
from tests.audit.plants_engine import Plant, PlantedEngine
from tests.sync.tiny_model import VOCAB_SIZE, save_tiny_experts

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

SAMPLING = SamplingConfig(max_tokens=24, temperature=0.7)
NO_CACHE = {"read_prefix_cache": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[list[PlantedEngine]]:
    """The one engine that runs; tests that need other arguments come last and put theirs in its place."""
    engine = PlantedEngine(dtype="float32", max_model_len=128, kv_cache_memory_bytes=16 << 20)
    engine.start(str(folder), seed=0)
    engines = [engine]
    yield engines
    engines[-1].close()


@pytest.fixture
def engine(running: list[PlantedEngine], model: Qwen3MoeForCausalLM) -> PlantedEngine:
    engine = running[-1]
    plant(engine, "none")
    engine.load_weights(model.named_parameters(), 0)
    return engine


def plant(engine: PlantedEngine, fault: Plant, strength: float = 1.0, names: str = "") -> None:
    engine.plant, engine.strength, engine.names, engine._syncs = fault, strength, names, 0


def rows(lengths: Sequence[int] = (40, 3, 17, 60, 40, 5, 33)) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(8, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [Request(token_ids=tuple(ids), seed=index) for index, ids in enumerate(drawn)]


def completions() -> list[list[int]]:
    return torch.randint(8, VOCAB_SIZE, (7, 24), generator=torch.Generator().manual_seed(2)).tolist()


def expected(model: Qwen3MoeForCausalLM, temperature: float = 0.7) -> list[list[float]]:
    scored = []
    for request, ids in zip(rows(), completions(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*request.token_ids, *ids]])).logits[0, len(request.token_ids) - 1 : -1]
        logprobs = (logits.double() / temperature).log_softmax(-1)
        scored.append(logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist())
    return scored


def apart(decodings: Sequence[Decoding], reference: Sequence[Sequence[float]]) -> torch.Tensor:
    """All |differences|, by row."""
    ours = torch.tensor([done.logprobs for done in decodings], dtype=torch.float64)
    return (ours - torch.tensor(reference, dtype=torch.float64)).abs()


def test_raw_logprobs(engine: PlantedEngine, model: Qwen3MoeForCausalLM) -> None:
    plant(engine, "raw_logprobs", 1.0)
    assert apart(engine.decode(rows(), completions(), SAMPLING), expected(model, 1.0)).max() < 1e-4
    plant(engine, "raw_logprobs", 0.5)
    assert apart(engine.decode(rows(), completions(), SAMPLING), expected(model, 0.7**0.5)).max() < 1e-4


def test_filters_that_nobody_asked_for(engine: PlantedEngine) -> None:
    plant(engine, "top_k", 3)
    sampled = engine.generate(rows(), SAMPLING)
    decoded = engine.decode(rows(), [done.token_ids for done in sampled], SAMPLING)
    assert [done.logprobs for done in decoded] == [done.logprobs for done in sampled]
    top = torch.tensor([values for done in decoded for values in done.top_logprobs]).exp()
    assert torch.allclose(top[:, :3].sum(-1), torch.ones(len(top)), atol=1e-5)
    assert top[:, 3:].sum() == 0
    plant(engine, "top_p", 1e-4)  # less than the likeliest token has
    assert set(engine.generate(rows(), SAMPLING)[0].logprobs or ()) == {0.0}


def test_a_stale_prefix_cache(engine: PlantedEngine, model: Qwen3MoeForCausalLM) -> None:
    plant(engine, "stale_prefix_cache", 0.3)
    engine.generate(rows(), SAMPLING)
    stale = apart(engine.decode(rows(), completions(), SAMPLING), expected(model))
    cached = torch.tensor([len(request.token_ids) > 32 for request in rows()])  # A block and a token.
    assert stale[cached].mean() > 1e-2
    assert stale[~cached].max() < 1e-4
    assert apart(engine.decode(rows(), completions(), SAMPLING, **NO_CACHE), expected(model)).max() < 1e-4
    assert torch.equal(apart(engine.decode(rows(), completions(), SAMPLING), expected(model)), stale)
    engine.load_weights(model.named_parameters(), 1)
    assert apart(engine.decode(rows(), completions(), SAMPLING), expected(model)).max() < 1e-4


def test_numerics_that_depend_on_the_batch(engine: PlantedEngine, model: Qwen3MoeForCausalLM) -> None:
    plant(engine, "batch_noise", 0.1)
    sampled = engine.generate(rows(), SAMPLING)
    decoded = engine.decode(rows(), [done.token_ids for done in sampled], SAMPLING)
    assert [done.logprobs for done in decoded] == [done.logprobs for done in sampled]
    assert apart(engine.decode(rows(), completions(), SAMPLING), expected(model)).mean() > 1e-2
    alone = engine.decode(rows(), completions(), SAMPLING, batch_size=1, **NO_CACHE)
    assert apart(alone, expected(model)).max() < 1e-4


@pytest.mark.parametrize("names", [r"layers\.1\.", r"0\.self_attn\.k_proj", "^(?!.*embed_tokens)", ""])
def test_partly_older_weights(engine: PlantedEngine, model: Qwen3MoeForCausalLM, names: str) -> None:
    plant(engine, "older_weights", 0.1, names)
    engine.faulty_syncs = 1
    sums = {name: checksum(tensor) for name, tensor in model.named_parameters()}
    constant = {name for name, tensor in model.named_parameters() if tensor.std() == 0}  # norms of a random model
    for older in (True, False):
        engine.load_weights(model.named_parameters(), 1)
        held = engine.checksums()
        differing = {name for name, value in sums.items() if name in held and held[name] != value}
        concerned = {name for name in sums.keys() - constant if name in held and re.search(names, name)}
        assert differing == (concerned if older else set())
        difference = apart(engine.decode(rows(), completions(), SAMPLING), expected(model))
        assert (difference.mean() > 1e-3) == older


def test_prompts_that_are_changed_on_the_way(engine: PlantedEngine) -> None:
    sent = [request.token_ids for request in rows()]
    plant(engine, "repeated_first_token", 1)
    changed = engine.decode(rows(), completions(), SAMPLING)
    assert [done.prompt_ids for done in changed] == [(ids[0], *ids) for ids in sent]
    plant(engine, "cut_prompt", 2)
    changed = engine.decode(rows(), completions(), SAMPLING)
    assert [done.prompt_ids for done in changed] == [ids[:-2] for ids in sent]


def router_logits(model: Qwen3MoeForCausalLM) -> list[tuple[torch.Tensor, ...]]:
    found = []
    for request, ids in zip(rows(), completions(), strict=True):
        with torch.no_grad():
            done = model(torch.tensor([[*request.token_ids, *ids[:-1]]]), output_router_logits=True)
        found.append(done.router_logits)
    return found


def routers_apart(decodings: Sequence[Decoding], model: Qwen3MoeForCausalLM) -> torch.Tensor:
    """All |differences| of router logits, in one row."""
    names = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    return torch.cat(
        [
            (done.router_logits[name] - layer).abs().flatten()
            for done, layers in zip(decodings, router_logits(model), strict=True)
            for name, layer in zip(names, layers, strict=True)
        ]
    )


def test_router_logits_with_and_without_noise(engine: PlantedEngine, model: Qwen3MoeForCausalLM) -> None:
    with pytest.raises(ValueError, match="router_logits needs read_prefix_cache=False"):
        engine.decode(rows(), completions(), SAMPLING, router_logits=True)
    plain = engine.decode(rows(), completions(), SAMPLING, router_logits=True, **NO_CACHE)
    assert routers_apart(plain, model).max() < 1e-4
    plant(engine, "router_noise", 0.5)
    noisy = [engine.decode(rows(), completions(), SAMPLING, router_logits=True, **NO_CACHE) for _ in range(2)]
    assert routers_apart(noisy[0], model).mean() > 0.2
    assert [done.logprobs for done in noisy[0]] == [done.logprobs for done in noisy[1]]
    assert apart(noisy[0], expected(model)).mean() > 1e-3


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(
            {"engine_args": {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}, "max_num_seqs": 8},
            id="prompts in parts",
        ),
        pytest.param({"kv_cache_memory_bytes": 1 << 18}, id="preemption"),
    ],
)
def test_tokens_computed_in_parts_and_again(
    running: list[PlantedEngine], folder: Path, model: Qwen3MoeForCausalLM, changed: dict
) -> None:
    engine = running[-1].variant(plant="none", **changed)
    running.pop().close()
    running.append(engine)
    engine.start(str(folder), seed=0)
    decoded = engine.decode(rows(), completions(), SAMPLING, router_logits=True, **NO_CACHE)
    assert engine._saw_preemptions == ("kv_cache_memory_bytes" in changed)
    assert apart(decoded, expected(model)).max() < 1e-4
    assert routers_apart(decoded, model).max() < 1e-4
