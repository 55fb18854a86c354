"""One rollout gives one gradient, norm, clip and step, however it is split over processes, stages and micro-batches."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import free_port, on_ranks
from tests.training.split_run import ACCUMULATE, CLIP, STRATEGIES, table, worker
from tests.training.tiny_runs import write_prompts

CUTS = (*(f"accumulate {n}" for n in ACCUMULATE), "token budget")


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory) -> dict:
    """(strategy, rank) -> cut -> what `fit` found; one process alone is the strategy `single`."""
    folder = tmp_path_factory.mktemp("split")
    prompts = write_prompts(folder)
    on_ranks(worker, tiny_model, prompts, str(folder), free_port())
    found = {
        (strategy, rank): torch.load(folder / f"{strategy}-{rank}.pt") for strategy in STRATEGIES for rank in range(2)
    }
    return found | {("single", 0): table(tiny_model, prompts, "auto", devices=1)}


def norm(gradients: dict) -> float:
    """By hand, in float64."""
    return sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_gradients_weights_and_metrics_are_those_of_one_process_and_one_micro_batch(runs, strategy, cut):
    reference = runs["single", 0]["accumulate 1"]
    for rank in range(1 if strategy == "single" else 2):
        found = runs[strategy, rank][cut]
        assert len(found["gradients"]) == len(reference["gradients"]) == 2
        for mine, expected in zip(found["gradients"], reference["gradients"], strict=True):
            assert norm(expected) > 2 * CLIP
            for name, gradient in expected.items():
                torch.testing.assert_close(mine[name].view_as(gradient), gradient, rtol=1e-5, atol=1e-5, msg=name)
        assert found["metrics"]["policy/grad_norm"] == pytest.approx(norm(reference["gradients"][1]), rel=1e-5)
        for name, weight in reference["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-5, msg=name)
        assert found["metrics"] == pytest.approx(reference["metrics"], rel=1e-5, abs=1e-5)


def test_ranks_had_unequal_tokens_and_the_weights_moved(runs, tiny_model):
    from transformers import AutoModelForCausalLM

    start = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    weights = runs["single", 0]["accumulate 1"]["weights"]
    assert max((weights[name] - start[name]).abs().max().item() for name in weights) > 1e-3


@pytest.mark.parametrize(
    ("fault", "counted"),
    [("rejected", "policy/skipped_update_fraction"), ("non-finite", "policy/non_finite_update_fraction")],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_is_left_out_leaves_the_weights_on_every_rank(runs, strategy, fault, counted):
    """The optimiser has momentum from the first step: a gradient of zeros would move them."""
    for rank in range(2):
        found = runs[strategy, rank][fault]
        assert found["metrics"][counted] == 1
        for name, weight in found["before"].items():
            assert torch.equal(found["weights"][name], weight), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_without_rollout_logprobs_makes_all_run_uncorrected(runs, strategy):
    mute, uncorrected = runs[strategy, 0]["mute"], runs[strategy, 0]["uncorrected"]
    for mine, expected in zip(mute["gradients"], uncorrected["gradients"], strict=True):
        for name, gradient in expected.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-6, atol=1e-6, msg=name)
    corrected = runs[strategy, 0]["accumulate 1"]["gradients"][0]
    assert any(not torch.allclose(corrected[n], mute["gradients"][0][n], rtol=1e-3) for n in corrected)
    assert 0 < mute["metrics"]["rollout_correction/missing_logprob_fraction"] < 1
