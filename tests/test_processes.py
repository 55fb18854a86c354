"""The quickstart on two processes, with the real vLLM and every strategy: it learns, and goes on exactly."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.chaos import chaos
from tests.runs import assert_equal_weights, last_weights, quickstart

STRATEGIES = ("ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
pytestmark = pytest.mark.slow


def sampled(*chosen: str) -> list:
    """All strategies; those not chosen only in the long run."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.long) for name in STRATEGIES]


def on(processes: int, strategy: str) -> list[str]:
    """Arguments."""
    return ["--trainer.devices", str(processes), "--trainer.strategy", strategy]


@pytest.mark.parametrize("strategy", sampled("deepspeed_stage_3"))
def test_the_quickstart_learns_on_two_processes(tmp_path, strategy):
    quickstart(tmp_path, *on(2, strategy), "--trainer.max_steps", "160")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["before"]["val/exact_match"] <= 0.60
    assert summary["after"]["val/exact_match"] >= 0.85


SHORT = ("--data.val", "null", "--data.mini_batches", "2", "--trainer.accumulate_grad_batches", "2")


@pytest.mark.parametrize("strategy", sampled("deepspeed_stage_2"))
def test_a_run_goes_on_exactly_also_on_another_number_of_processes(tmp_path, strategy):
    """6 steps at once, or 3 and 3; the third is inside a rollout."""
    quickstart(tmp_path / "straight", *SHORT, *on(2, strategy), "--trainer.max_steps", "6")
    straight = last_weights(tmp_path / "straight")
    for first, then in ((2, (2, 1)), (1, (2,))):
        half = tmp_path / f"{first}"
        quickstart(half, *SHORT, *on(first, strategy), "--trainer.max_steps", "3")
        for processes in then:
            folder = shutil.copytree(half, tmp_path / f"{first}-{processes}", symlinks=True)
            quickstart(folder, *SHORT, *on(processes, strategy), "--trainer.max_steps", "6", "--ckpt_path", "last")
            tolerance = 0.0 if first == processes == 2 else 1e-5
            assert_equal_weights(straight, last_weights(folder), tolerance)


@pytest.mark.parametrize(
    ("processes", "fault"),
    [(on(1, "auto"), "hang"), (on(2, "deepspeed_stage_3"), "raise")],
    ids=["hangs, alone", "fails, on one of two ranks"],
)
def test_an_engine_that_fails_is_started_again_and_the_run_ends_the_same(tmp_path, processes, fault):
    """Call 4 is in a rollout: the first is the canary's."""
    arguments = (*processes, "--data.val", "null", "--trainer.max_steps", "4")
    quickstart(tmp_path / "healthy", *arguments)
    engine = {"fault": fault, "at_calls": [4], "dtype": "float32", "max_model_len": 64}
    engine |= {"max_num_seqs": 256}
    faulty = json.dumps({"class_path": "tests.faulty_engine.FaultyEngine", "init_args": engine})
    done = quickstart(tmp_path / "faulty", *arguments, "--data.engine", faulty)
    assert "restart 1 of 3 in a row" in done.stderr
    assert_equal_weights(last_weights(tmp_path / "healthy"), last_weights(tmp_path / "faulty"))


@pytest.mark.parametrize(
    ("kills", "processes"),
    [
        (3, on(2, "deepspeed_stage_2")),
        *(pytest.param(20, on(2, strategy), marks=pytest.mark.long) for strategy in STRATEGIES),
        pytest.param(20, on(1, "auto"), marks=pytest.mark.long),
    ],
    ids=lambda value: " ".join(value[1::2]) if isinstance(value, list) else str(value),
)
def test_a_run_killed_again_and_again_ends_as_if_undisturbed(tmp_path, kills, processes):
    assert chaos(tmp_path, kills=kills, seed=1, steps=6 * kills + 6, processes=processes) == []
