"""Forced decoding, router logits and variants, with fakes that have vLLM's attributes; and the transformers engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from app.engine.errors import EngineError
from app.engine.forced_decoding import FORCED_IDS, FORCED_ROW, ForcedRow, forced_rows
from app.engine.router_logits import Place, RouterLogits
from app.engine.transformers_engine import TransformersEngine
from app.engine.vllm.decoding import forced_params, forced_tokens, to_decoding, vllm_places
from app.engine.vllm.engine import VLLMEngine
from app.types import Request, SamplingConfig
from app.weights.names import hf_router_names, routers
from tests.conftest import FakeEngine
from tests.sync.tiny_model import VOCAB_SIZE, load_tiny, save_tiny, save_tiny_experts, score

INF = float("inf")


class Sampler:
    """Draws id 9 for everyone; its log-probabilities are what it was given."""

    def sample(self, logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        return torch.full((len(logits),), 9, dtype=torch.int32), logits


def state(forced: list[int] | None, done: int, row: int = 0) -> SimpleNamespace:
    extra = None if forced is None else {FORCED_IDS: forced, FORCED_ROW: row}
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra), output_token_ids=[-1] * done)


def runner(**requests: SimpleNamespace) -> SimpleNamespace:
    """A runner whose batch holds these requests in order."""
    batch = SimpleNamespace(req_ids=list(requests), num_reqs=len(requests))
    return SimpleNamespace(sampler=Sampler(), input_batch=batch, requests=requests)


def test_each_request_emits_its_next_forced_id() -> None:
    """By its own count of tokens so far; asked for one more than there are, the last again; others keep their draw."""
    fake = runner(a=state([1, 2, 3], 0), b=state([4, 5], 1), c=state(None, 0), d=state([6], 1))
    logits = torch.zeros(4, 10)
    with forced_tokens(fake):
        sampled, logprobs = fake.sampler.sample(logits, None)
    assert sampled.tolist() == [1, 5, 9, 6]
    assert sampled.dtype == torch.int32
    assert logprobs is logits
    assert fake.sampler.sample(logits, None)[0].tolist() == [9] * 4
    assert vars(fake.sampler) == {}


def test_the_sampler_is_as_before_also_after_an_error() -> None:
    fake = runner(a=state([1], 0))
    fake.sampler.sample = wrapper = fake.sampler.sample
    with pytest.raises(KeyError), forced_tokens(fake):
        raise KeyError
    assert vars(fake.sampler) == {"sample": wrapper}


def test_another_model_runner_is_refused() -> None:
    with pytest.raises(EngineError, match="only its V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0"):
        forced_tokens(SimpleNamespace(sampler=Sampler())).__enter__()


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([(1,)], "2 requests but 1 completions"),
        ([(1,), ()], "request 1: the completion to decode is empty"),
        ([(1,), (1, 2, 3)], r"request 1: 2 prompt and 3 completion tokens do not fit .*max_model_len=4"),
        ([(1,), (50,)], "request 1: completion id 50 is outside the vocabulary of 50"),
    ],
)
def test_bad_completions_name_their_request(completions: list[tuple[int, ...]], message: str) -> None:
    requests = [Request(token_ids=(3, 4), seed=0)] * 2
    with pytest.raises(ValueError, match=message):
        forced_rows(requests, completions, max_model_len=4, vocab_size=50)
    assert forced_rows(requests, [(1,), (1, 2)], max_model_len=4, vocab_size=50)[1].computed == 3


def test_vllm_is_asked_for_all_ids_and_no_end() -> None:
    forced = ForcedRow(row=2, request=Request(token_ids=(1,), seed=5), token_ids=(7, 8))
    params = forced_params(forced, top_k=3, read_prefix_cache=False)
    assert params == {
        "max_tokens": 2,
        "seed": None,
        "logprobs": 3,
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_reading_prefix_cache": True,
        "extra_args": {FORCED_IDS: [7, 8], FORCED_ROW: 2},
    }


def output(*positions: dict[int, float], ids: Sequence[int]) -> SimpleNamespace:
    logprobs = [{token: SimpleNamespace(logprob=value) for token, value in at.items()} for at in positions]
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)], prompt_token_ids=[1, 1])


def test_the_likeliest_ids_exclude_the_forced_one_unless_it_is_likely() -> None:
    """vLLM puts the forced id first, then the likeliest; where it is among them there is one entry less."""
    forced = ForcedRow(row=0, request=Request(token_ids=(1,), seed=5), token_ids=(7, 8, 9))
    said = output({7: -9.0, 3: -0.5, 4: -1.5}, {8: -1.0, 5: -0.7}, {9: -INF, 2: -0.1, 6: -2.4}, ids=(7, 8, 9))
    done = to_decoding(forced, said, (-9.0, -1.0, -INF), 2, RouterLogits({}, [forced], list))
    assert done.top_ids == ((3, 4), (5, 8), (2, 6))
    assert done.top_logprobs == ((-0.5, -1.5), (-0.7, -1.0), (-0.1, -2.4))
    assert done.prompt_ids == (1, 1)
    assert done.router_logits == {}
    with pytest.raises(EngineError, match=r"request 0: vLLM did not decode the forced tokens but \[7, 8\]"):
        to_decoding(forced, output({7: 0.0}, {8: 0.0}, ids=(7, 8)), (), 2, RouterLogits({}, [forced], list))


class Block(nn.Module):
    """A mixture-of-experts block; with `alias` the experts hold the router too, as in newer vLLM."""

    def __init__(self, router: str, alias: bool = False) -> None:
        super().__init__()
        self.add_module(router, nn.Linear(2, 3, bias=False))
        self.shared_expert_gate = nn.Linear(2, 1)
        self.experts = nn.Module()
        if alias:
            self.experts.gate = self.get_submodule(router)


def test_routers_are_the_gates_beside_experts() -> None:
    dense = nn.Module()
    dense.gate = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": Block("gate", alias=True), "b": dense, "c": Block("router")})
    assert list(routers(model)) == ["a.gate", "c.router"]


def test_names_are_those_of_transformers(tmp_path: Path) -> None:
    names = hf_router_names(str(save_tiny_experts(tmp_path / "experts")))
    assert names == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert hf_router_names(str(save_tiny(tmp_path / "dense"))) == []


def test_router_logits_are_put_together_from_parts_of_a_prompt() -> None:
    """Two rows in three passes: a prompt in two parts, a token computed again, a row that has already ended."""
    rows = [
        ForcedRow(row=0, request=Request(token_ids=(1, 2, 3), seed=0), token_ids=(4, 5)),
        ForcedRow(row=1, request=Request(token_ids=(6,), seed=0), token_ids=(7,)),
    ]
    router = nn.Linear(1, 2, bias=False)
    router.weight.data = torch.tensor([[1.0], [-1.0]])
    places: list[Place] = []
    with RouterLogits({"gate": router}, rows, lambda: places) as recorded:
        places = [Place(1, 0, slice(0, 1)), Place(0, 0, slice(1, 3))]
        router(torch.tensor([[60.0], [10.0], [20.0], [99.0]]))  # One row of padding.
        with pytest.raises(EngineError, match=r"the router gate did not compute every token .*enforce_eager: true"):
            recorded.of(0)
        places = [Place(0, 1, slice(0, 2)), Place(1, 1, slice(2, 3))]
        router(torch.tensor([[21.0], [30.0], [99.0]]))
        places = [Place(0, 3, slice(0, 1))]
        router(torch.tensor([[40.0]]))
    router(torch.tensor([[99.0]]))
    assert recorded.of(0)["gate"].tolist() == [[10.0, -10.0], [21.0, -21.0], [30.0, -30.0], [40.0, -40.0]]
    assert recorded.of(1)["gate"].tolist() == [[60.0, -60.0]]


def test_places_follow_vllms_batch() -> None:
    fake = runner(a=state([1], 0, row=4), b=state([1], 0, row=2))
    fake.input_batch.num_computed_tokens_cpu = np.array([0, 7, 99])
    fake.query_start_loc = SimpleNamespace(np=np.array([0, 5, 6, 6]))
    assert vllm_places(fake) == [Place(4, 0, slice(0, 5)), Place(2, 7, slice(5, 6))]


def test_engines_without_the_means_say_so() -> None:
    with pytest.raises(EngineError, match="FakeEngine does not support forced decoding"):
        FakeEngine().decode([], [], SamplingConfig())
    with pytest.raises(EngineError, match="FakeEngine cannot be started with other arguments"):
        FakeEngine().variant(longest=3)


def test_a_variant_differs_in_what_was_replaced() -> None:
    engine = VLLMEngine(dtype="bfloat16", max_num_seqs=7, engine_args={"swap_space": 1})
    other = engine.variant(kv_cache_dtype="fp8", max_num_seqs=8)
    assert other.arguments == {**engine.arguments, "kv_cache_dtype": "fp8", "max_num_seqs": 8}
    assert (other.arguments["dtype"], other.arguments["engine_args"]) == ("bfloat16", {"swap_space": 1})
    assert engine.arguments["kv_cache_dtype"] == "auto"
    assert other.kv_cache_dtype == "fp8"
    with pytest.raises(ValueError, match="VLLMEngine has no argument 'dytpe'; it has dtype, max_model_len"):
        engine.variant(dytpe="float32")
    assert TransformersEngine(device="cpu").variant(batch_size=3).batch_size == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(device="cpu", max_model_len=64, batch_size=8)
    engine.start(str(folder), seed=0)
    return engine


def prompts(*lengths: int) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randint(8, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [Request(token_ids=tuple(ids), seed=100 + index) for index, ids in enumerate(drawn)]


def test_transformers_decodes_what_it_sampled(engine: TransformersEngine, folder: Path) -> None:
    requests, sampling = prompts(3, 20, 9, 1, 5), SamplingConfig(temperature=0.7, max_tokens=12)
    sampled = engine.generate(requests, sampling)
    ids = [done.token_ids for done in sampled]
    together = engine.decode(requests, ids, sampling, top_k=4)
    assert [done.logprobs for done in together] == [done.logprobs for done in sampled]
    apart = engine.decode(requests, ids, sampling, batch_size=2)
    rows = [(request.token_ids, forced) for request, forced in zip(requests, ids, strict=True)]
    for done, other, expected in zip(together, apart, score(load_tiny(folder), rows, 0.7), strict=True):
        assert done.logprobs == pytest.approx(expected, abs=1e-5)
        assert other.logprobs == pytest.approx(expected, abs=1e-5)
        assert {len(at) for at in done.top_ids} == {4}
    assert [done.prompt_ids for done in together] == [request.token_ids for request in requests]


def test_filtered_ids_have_no_probability(engine: TransformersEngine) -> None:
    (request,) = prompts(4)
    (plain,) = engine.decode([request], [(9, 10, 11)], SamplingConfig(), top_k=1)
    (best,) = engine.decode([request], [(plain.top_ids[0][0],)], SamplingConfig(top_k=1), top_k=1)
    assert best.logprobs == (0.0,)
    other = next(token for token in range(VOCAB_SIZE) if token != plain.top_ids[0][0])
    (outside,) = engine.decode([request], [(other,)], SamplingConfig(top_k=1), top_k=1)
    assert outside.logprobs == (-INF,)


def test_transformers_router_logits_are_those_of_one_pass(tmp_path: Path) -> None:
    folder = save_tiny_experts(tmp_path / "experts")
    engine = TransformersEngine(device="cpu")
    engine.start(str(folder), seed=0)
    requests, ids = prompts(3, 1, 7), [(9, 10, 11), (12,), (13, 14)]
    decoded = engine.decode(requests, ids, SamplingConfig(), router_logits=True)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, forced, done in zip(requests, ids, decoded, strict=True):
        with torch.no_grad():
            expected = model(
                torch.tensor([[*request.token_ids, *forced[:-1]]]), output_router_logits=True
            ).router_logits
        assert list(done.router_logits) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
        for ours, theirs in zip(done.router_logits.values(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
