"""A run that goes on from a checkpoint equals the undisturbed run, bit for bit, wherever it was written."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import free_port, on_ranks
from tests.training.resume_run import ELSEWHERE, STOPS, STRATEGIES, fit, runs, worker
from tests.training.tiny_runs import write_prompts

FILES = ("ddp",)
"""Strategies whose checkpoints the plain Trainer of these tests reads; DeepSpeed's folders need Lockstep's plugin."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def found(tiny_model, prompts, tmp_path_factory) -> dict:
    """Strategy -> what the runs of each rank found."""
    folder = tmp_path_factory.mktemp("resume")
    alone = {"single": [runs(tiny_model, prompts, "auto", 1, folder)]}
    on_ranks(worker, tiny_model, prompts, str(folder), free_port())
    ended = {name: fit(tiny_model, prompts, "auto", 1, {}, folder / f"{name}-2-{ELSEWHERE}.ckpt") for name in FILES}
    alone["single"][0]["from two processes"] = ended
    return alone | {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)] for name in STRATEGIES}


@pytest.mark.parametrize("stop", [*STOPS, "with a number of epochs"])
@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_weights_and_what_is_logged_are_those_of_the_undisturbed_run(found, strategy, stop):
    for rank in found[strategy]:
        straight, resumed = rank["undisturbed"], rank[stop]
        for name, weight in straight["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name
    straight, resumed = found[strategy][0]["undisturbed"]["logged"], found[strategy][0][stop]["logged"]
    assert set(straight) == {3, 6}
    assert straight[3]["off_policy_mask/dropped_rows"] > 0
    for step, values in resumed.items():
        assert values == straight[step]
    assert set(resumed) == ({3, 6} if STOPS.get(stop, 6) < 6 else {6})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_number_of_processes_goes_on_to_rounding(found, strategy):
    """Also what is logged: the first of its steps was done by the others."""
    straight = found["single"][0]["undisturbed"]
    changed = [found[strategy][0]["from one process"]]
    if strategy in FILES:
        changed.append(found["single"][0]["from two processes"][strategy])
    for resumed in changed:
        for name, weight in straight["weights"].items():
            torch.testing.assert_close(resumed["weights"][name], weight, rtol=1e-5, atol=1e-5, msg=name)
        assert resumed["logged"][6] == pytest.approx(straight["logged"][6], rel=1e-5, abs=1e-5)
