"""The engine's side: which engine runs under which condition, and what real vLLM then gives for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.audit.sides.condition import EngineCondition
from app.audit.sides.engine_side import EngineSide, token_scores
from app.builtin.models import BUILT_IN_MODEL, resolve_model
from app.data.prompts import tokenize_prompts
from app.data.sources import PromptSource, load_rows
from app.data.tokenizer import load_tokenizer
from app.engine.errors import EngineError
from app.engine.protocol import Engine
from app.engine.vllm.engine import VLLMEngine
from app.engine.weight_layout import WeightLayout
from app.types import Completion, Decoding, Request, SamplingConfig
from app.weights.checksum import checksum

SAMPLING = SamplingConfig(max_tokens=8, temperature=0.7, top_p=0.9)


class ToldEngine(Engine):
    """Decodes every token as the number of its state: its arguments, what it was sent, how it was asked."""

    log: list[str]

    def __init__(self, dtype: str = "bfloat16", shared: list[str] | None = None) -> None:
        self.log = [] if shared is None else shared
        self.arguments = {"dtype": dtype, "shared": self.log}
        self.dtype = dtype
        self.asked: list[tuple[SamplingConfig, dict[str, Any]]] = []

    def start(self, model_path: str, seed: int) -> None:
        self.log.append(f"start {self.dtype} from {model_path} with {seed}")

    def decode(
        self, requests: Sequence[Request], completions: Sequence[Sequence[int]], sampling: SamplingConfig, **how: Any
    ) -> list[Decoding]:
        self.log.append("decode")
        self.asked.append((sampling, how))
        return [
            Decoding(prompt_ids=request.token_ids, logprobs=(-1.0,), top_ids=(), top_logprobs=(), router_logits={})
            for request in requests
        ]

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        raise NotImplementedError

    def load_weights(self, weights: Any, policy_version: int) -> None:
        self.log.append("sent")

    def checksums(self) -> dict[str, int]:
        return {"a": 1, "b": 2}

    def weight_layout(self) -> WeightLayout:
        shapes = {name: torch.Size((1,)) for name in "abc"}
        return WeightLayout(shapes=shapes, dtypes={}, opaque=("experts.",))

    def close(self) -> None:
        self.log.append("close")


def told(**others: Any) -> tuple[EngineSide, ToldEngine]:
    engine = ToldEngine()
    side = EngineSide(
        engine,
        [Request(token_ids=(1, 2), seed=0)],
        [(3,)],
        SAMPLING,
        model_path=Path("folder"),
        send=lambda engine: engine.load_weights([], 0),
        seed=5,
        **others,
    )
    return side, engine


FLOAT32 = (("dtype", "float32"),)


def test_each_condition_is_measured_once_and_one_engine_lives() -> None:
    side, engine = told()
    for condition in (
        EngineCondition(),
        EngineCondition(batch_size=1),
        EngineCondition(weights="sent"),
        EngineCondition(args=FLOAT32),
        EngineCondition(args=FLOAT32, weights="files", batch_size=1),
        EngineCondition(args=FLOAT32, weights="sent"),
        EngineCondition(args=FLOAT32, batch_size=2),
        EngineCondition(weights="files"),
    ):
        first = side.measure(condition)
        log = len(engine.log)
        assert side.measure(condition) is first
        assert len(engine.log) == log
    assert side.measure(EngineCondition(args=FLOAT32, weights="files")) is side.measure(EngineCondition(args=FLOAT32))
    side.close()
    side.close()
    start = "start float32 from folder with 5"
    assert engine.log == [
        *["decode", "decode"],
        *["sent", "decode"],
        *["close", start, "decode", "decode"],
        *["sent", "decode"],
        *["close", start, "decode"],  # Sent weights cannot be taken back.
        *["close", "start bfloat16 from folder with 5", "decode"],
        "close",
    ]


def test_the_condition_reaches_the_engine() -> None:
    side, engine = told(top_k=3, experts=True)
    side.measure(EngineCondition())
    side.measure(EngineCondition(neutral_sampling=True, read_prefix_cache=False, batch_size=4))
    assert engine.asked == [
        (SAMPLING, {"top_k": 3, "batch_size": None, "read_prefix_cache": True, "router_logits": False}),
        (
            SamplingConfig(max_tokens=8, temperature=0.7),
            {"top_k": 3, "batch_size": 4, "read_prefix_cache": False, "router_logits": True},
        ),
    ]


def test_held_weights_cannot_be_measured_after_others_were_sent() -> None:
    side, _ = told()
    assert side.consumed_prompts() == [(1, 2)]
    assert side.weights_differing({"a": 1, "b": 3, "c": 4, "experts.d": 5, "tied": 6}) == ["b", "c"]
    assert side.holds_state
    assert side.can_measure(EngineCondition(batch_size=1))
    side.measure(EngineCondition(weights="sent"))
    assert not side.holds_state
    side.measure(EngineCondition())  # Known.
    assert side.can_measure(EngineCondition())
    assert side.can_measure(EngineCondition(batch_size=1, args=(("dtype", "float32"),)))
    assert not side.can_measure(EngineCondition(batch_size=1))
    with pytest.raises(EngineError, match="measure conditions with held weights before"):
        side.measure(EngineCondition(batch_size=1))
    with pytest.raises(EngineError, match="compare them earlier"):
        side.weights_differing({})


def test_an_unknown_argument_leaves_the_engine_alone() -> None:
    side, engine = told()
    with pytest.raises(ValueError, match="ToldEngine has no argument 'dtpye'"):
        side.measure(EngineCondition(args=(("dtpye", "float32"),)))
    assert engine.log == []
    assert side.holds_state


def test_scores_of_all_rows_in_one() -> None:
    decodings = [
        Decoding(
            prompt_ids=(1,),
            logprobs=values,
            top_ids=tuple((token, token + 1) for token in range(len(values))),
            top_logprobs=tuple((-0.5, -1.5) for _ in values),
            router_logits={},
        )
        for values in ((-0.1, -0.2), (-0.3,))
    ]
    scores = token_scores(decodings)
    assert scores.logprobs.tolist() == [-0.1, -0.2, -0.3]
    assert scores.top_ids is not None
    assert scores.top_ids.tolist() == [[0, 1], [1, 2], [0, 1]]
    assert scores.top_logprobs is not None
    assert scores.top_logprobs.shape == (3, 2)


@pytest.fixture(scope="module")
def built_in() -> str:
    return resolve_model(BUILT_IN_MODEL)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rows = load_rows(PromptSource(path="lockstep/addition", limit=20))
    prompts = tokenize_prompts(rows, load_tokenizer(BUILT_IN_MODEL), 64, "prompts")
    return [Request(token_ids=prompt.token_ids, seed=index) for index, prompt in enumerate(prompts)]


def closest(decodings: Sequence[Decoding], expected: Sequence[Sequence[float]]) -> float:
    """Largest |difference|."""
    pairs = [zip(done.logprobs, values, strict=True) for done, values in zip(decodings, expected, strict=True)]
    return max(abs(ours - theirs) for row in pairs for ours, theirs in row)


def logprobs_of(completions: Sequence[Completion]) -> list[tuple[float, ...]]:
    return [done.logprobs or () for done in completions]


def full(path: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[torch.Tensor]:
    """Each row's [T, V] log-probabilities from transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    scored = []
    for prompt, ids in rows:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        scored.append((logits / temperature).log_softmax(-1))
    return scored


@pytest.fixture(scope="module")
def sampled(built_in: str, requests: list[Request]) -> Iterator[tuple[VLLMEngine, list[Completion]]]:
    pytest.importorskip("vllm")
    engine = VLLMEngine(dtype="float32", max_model_len=64, max_num_seqs=32, kv_cache_memory_bytes=32 << 20)
    engine.start(built_in, seed=1)
    yield engine, engine.generate(requests, SamplingConfig(max_tokens=8, temperature=0.7))
    engine.close()


def test_vllm_decodes_what_it_sampled(
    sampled: tuple[VLLMEngine, list[Completion]], requests: list[Request], built_in: str
) -> None:
    engine, completions = sampled
    sampling, ids = SamplingConfig(max_tokens=8, temperature=0.7), [done.token_ids for done in completions]
    states = torch.get_rng_state()
    same = engine.decode(requests, ids, sampling)
    assert [done.logprobs for done in same] == logprobs_of(completions)
    assert torch.equal(torch.get_rng_state(), states)
    for changed in ({"batch_size": 7}, {"batch_size": 1}, {"read_prefix_cache": False}):
        assert closest(engine.decode(requests, ids, sampling, **changed), logprobs_of(completions)) < 1e-5
    assert [done.prompt_ids for done in same] == [request.token_ids for request in requests]
    rows = [(request.token_ids, forced) for request, forced in zip(requests, ids, strict=True)]
    for done, expected in zip(same, full(built_in, rows, 0.7), strict=True):
        for at, top_ids, top in zip(expected, done.top_ids, done.top_logprobs, strict=True):
            assert top_ids[0] == int(at.argmax())
            assert top == pytest.approx(at.topk(5).values.tolist(), abs=1e-4)


def test_other_ids_than_it_would_draw_and_filters(
    sampled: tuple[VLLMEngine, list[Completion]], requests: list[Request], built_in: str
) -> None:
    """Ids of nobody's choice, the end of sequence in the middle, and half of the mass filtered out."""
    engine, eos = sampled[0], sampled[0]._eos[0]
    generator = torch.Generator().manual_seed(3)
    vocabulary = engine._vocab_size
    ids = [torch.randint(vocabulary, (5,), generator=generator).tolist() for _ in requests]
    ids = [(*row[:2], eos, *row[2:]) for row in ids]
    rows = [(request.token_ids, forced) for request, forced in zip(requests, ids, strict=True)]
    for top_p in (1.0, 0.5):
        decoded = engine.decode(requests, ids, SamplingConfig(temperature=2.0, top_p=top_p))
        for done, forced, at in zip(decoded, ids, full(built_in, rows, 2.0), strict=True):
            probs, order = at.exp().sort(descending=True)
            support = (probs.cumsum(-1) - probs < top_p).scatter(-1, order, probs.cumsum(-1) - probs < top_p)
            expected = at.masked_fill(~support, -torch.inf).log_softmax(-1).gather(-1, torch.tensor(forced)[:, None])
            assert done.logprobs == pytest.approx(expected[:, 0].tolist(), abs=1e-4)
        assert any(value == -float("inf") for done in decoded for value in done.logprobs) == (top_p < 1)


def test_the_sides_of_a_real_engine(
    sampled: tuple[VLLMEngine, list[Completion]], requests: list[Request], built_in: str
) -> None:
    """Weights held, sent and from the files, then another dtype; this test comes last, since it closes the engine."""
    engine, completions = sampled
    model = AutoModelForCausalLM.from_pretrained(built_in, dtype=torch.float32)
    expected = {name: checksum(parameter) for name, parameter in model.named_parameters()}
    wrong = [(name, 1.1 * tensor if "layers.0.mlp" in name else tensor) for name, tensor in model.named_parameters()]
    engine.load_weights(wrong, 1)
    sampling, ids = SamplingConfig(max_tokens=8, temperature=0.7), [done.token_ids for done in completions]
    side = EngineSide(
        engine,
        requests,
        ids,
        sampling,
        model_path=Path(built_in),
        send=lambda engine: engine.load_weights(model.named_parameters(), 2),
        seed=1,
    )
    assert side.weights_differing(expected) == [name for name in expected if "layers.0.mlp" in name]
    original = logprobs_of(completions)
    assert closest(side.measure(EngineCondition()), original) > 1e-2
    assert closest(side.measure(EngineCondition(weights="sent")), original) < 1e-5
    assert closest(side.measure(EngineCondition(weights="files")), original) < 1e-5
    coarse = side.measure(EngineCondition(args=(("dtype", "bfloat16"),)))
    assert 1e-3 < closest(coarse, original) < 1
    side.close()
    assert engine._llm is None
