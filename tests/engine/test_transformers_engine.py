from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from app.data.end_tokens import eos_token_ids
from app.engine.errors import EngineError
from app.engine.protocol import check_requests
from app.engine.transformers_engine import TransformersEngine
from app.maths.sampling import sampled_distribution
from app.types import Completion, Request, SamplingConfig
from tests.sync.tiny_model import EOS_IDS, VOCAB_SIZE, load_tiny, perturb, save_tiny, score


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(device="cpu", max_model_len=64, batch_size=8)
    engine.start(str(folder), seed=0)
    return engine


def _requests(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    lengths = [3 + 5 * (index % 4) for index in range(count)]
    prompts = [torch.randint(8, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [Request(token_ids=tuple(prompt), seed=100 + index) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_scaled_distribution(
    engine: TransformersEngine, folder: Path, temperature: float
) -> None:
    requests = _requests(6)
    completions = engine.generate(requests, SamplingConfig(temperature=temperature, max_tokens=12))
    rows = [(request.token_ids, done.token_ids) for request, done in zip(requests, completions, strict=True)]
    for done, expected in zip(completions, score(load_tiny(folder), rows, temperature), strict=True):
        assert done.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_completion_does_not_depend_on_its_neighbours(engine: TransformersEngine) -> None:
    requests, sampling = _requests(11), SamplingConfig(max_tokens=10)
    together = engine.generate(requests, sampling)
    alone = [engine.generate([request], sampling)[0] for request in requests]
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    assert len({done.token_ids for done in together}) == len(requests)


def test_every_end_token_ends_a_completion_and_belongs_to_it(engine: TransformersEngine) -> None:
    requests = [Request(token_ids=(9, 10), seed=seed) for seed in range(192)]
    completions = engine.generate(requests, SamplingConfig(max_tokens=40))
    _assert_ends(completions, max_tokens=40)


def _assert_ends(completions: list[Completion], max_tokens: int) -> None:
    assert {done.token_ids[-1] for done in completions if done.finish_reason == "stop"} == set(EOS_IDS)
    for done in completions:
        assert not set(done.token_ids[:-1]) & set(EOS_IDS)
        assert (done.token_ids[-1] in EOS_IDS) == (done.finish_reason == "stop")
        assert done.finish_reason == "stop" or len(done.token_ids) == max_tokens


def test_the_context_cuts_with_reason_length(engine: TransformersEngine) -> None:
    (done,) = engine.generate([Request(token_ids=(9,) * 60, seed=1)], SamplingConfig(max_tokens=50))
    assert (len(done.token_ids), done.finish_reason) == (4, "length")


def test_greedy_takes_the_likeliest_token(engine: TransformersEngine, folder: Path) -> None:
    request = _requests(1)[0]
    (done,) = engine.generate([request], SamplingConfig(temperature=0.0, max_tokens=5))
    ids = list(request.token_ids)
    model = load_tiny(folder)
    for token, logprob in zip(done.token_ids, done.logprobs or (), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        assert token == int(expected.argmax())
        assert logprob == pytest.approx(float(expected.max()), abs=1e-4)
        ids.append(token)


def test_draws_follow_the_distribution() -> None:
    """20000 draws from p = (0.5, 0.3, 0.2): counts within 4 standard deviations."""
    from app.engine.transformers_engine import _draw

    probs = torch.tensor([0.5, 0.3, 0.2])
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([_draw(probs.log(), generator, 1.0) for _ in range(20000)]))
    for count, p in zip(counts.tolist(), probs.tolist(), strict=True):
        assert abs(count - 20000 * p) < 4 * math.sqrt(20000 * p * (1 - p))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingConfig(), {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}),
        (SamplingConfig(top_k=2), {0: 0.625, 1: 0.375}),
        (SamplingConfig(top_p=0.7), {0: 0.625, 1: 0.375}),
        (SamplingConfig(top_p=0.01), {0: 1.0}),
        (SamplingConfig(min_p=0.25), {0: 10 / 19, 1: 6 / 19, 2: 3 / 19}),
        (SamplingConfig(temperature=0.5), {0: 100 / 146, 1: 36 / 146, 2: 9 / 146, 3: 1 / 146}),
    ],
)
def test_filters_renormalise_over_what_they_keep(sampling: SamplingConfig, kept: dict[int, float]) -> None:
    """p = (0.5, 0.3, 0.15, 0.05) by hand; at temperature 1/2 the probabilities go as the squares."""
    probs = sampled_distribution(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), sampling)[0].exp()
    assert {i: float(p) for i, p in enumerate(probs) if p > 0} == pytest.approx(kept, abs=1e-6)


def test_new_weights_are_sampled_from(engine: TransformersEngine, folder: Path) -> None:
    model = perturb(load_tiny(folder), seed=3)
    fresh = TransformersEngine(device="cpu")
    fresh.start(str(folder), seed=0)
    fresh.load_weights(model.named_parameters(), policy_version=4)
    requests = _requests(4)
    completions = fresh.generate(requests, SamplingConfig(max_tokens=8))
    rows = [(request.token_ids, done.token_ids) for request, done in zip(requests, completions, strict=True)]
    for done, expected in zip(completions, score(model, rows), strict=True):
        assert done.logprobs == pytest.approx(expected, abs=1e-4)
    assert fresh.policy_version == 4
    fresh.close()
    with pytest.raises(EngineError, match="call start first"):
        fresh.generate(requests, SamplingConfig())


def test_nan_weights_are_an_error(folder: Path) -> None:
    model = load_tiny(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    engine = TransformersEngine(device="cpu")
    engine.start(str(folder), seed=0)
    engine.load_weights(model.named_parameters(), policy_version=1)
    with pytest.raises(EngineError, match="NaN"):
        engine.generate(_requests(1), SamplingConfig(max_tokens=2))


def test_penalties_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match="applies no penalties"):
        engine.generate(_requests(1), SamplingConfig(repetition_penalty=1.1))


def test_a_missing_folder_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="could not load"):
        TransformersEngine(device="cpu").start(str(tmp_path / "nowhere"), seed=0)


def test_end_tokens_of_all_three_files_count(folder: Path) -> None:
    assert eos_token_ids(str(folder)) == sorted(EOS_IDS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "request 1: the prompt is empty"),
        ((3,) * 16, "request 1: the prompt has 16 tokens and .* max_model_len=16"),
        ((3, 300), "request 1: token id 300 is outside the model's vocabulary of 300 ids"),
        ((-1,), "request 1: token id -1 is outside"),
    ],
)
def test_bad_prompts_name_their_row(prompt: tuple[int, ...], message: str) -> None:
    good = Request(token_ids=(3,) * 15, seed=0)
    check_requests([good], max_model_len=16, vocab_size=300)
    with pytest.raises(ValueError, match=message):
        check_requests([good, Request(token_ids=prompt, seed=0)], max_model_len=16, vocab_size=300)
