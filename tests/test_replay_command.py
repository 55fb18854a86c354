"""`python -m app replay`: from a guard's file to a verdict, without an engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.data.collate import collate
from app.engine.vllm.engine import VLLMEngine
from app.errors import LockstepError
from app.guards.nonfinite import NonFiniteConfig, NonFiniteGuard
from app.trainer import LockstepTrainer
from app.training.module import GRPOModule
from app.types import StepTotals, TrainRow
from app.world import World
from tests.test_cli import QUICKSTART, app

PLANTED = "model.layers.1.mlp.down_proj"


@pytest.fixture
def file(tmp_path, tiny_model) -> Path:
    """What the guard writes of two rows, whose gradient was not finite."""
    rows = [
        TrainRow.of_completion(
            prompt_ids=(5, 14, 6), completion_ids=ids, rollout_logprobs=(-2.0,) * len(ids), advantage=sign, reward=sign
        )
        for ids, sign in (((7, 8, 9), 1.0), ((10, 11), -1.0))
    ]
    batch = collate(rows, pad_token_id=0, totals=StepTotals(tokens=5, rows=2, micro_batches=1))
    settings = GRPOModule(tiny_model).loss_settings
    guard = NonFiniteGuard(NonFiniteConfig(), tmp_path, World(), lambda: settings)
    guard.watch(batch, batch.rollout_logprobs, torch.tensor(0.0))
    with pytest.warns(UserWarning, match="replay"):
        assert guard.close_step(torch.tensor(math.inf), 1)
    return tmp_path / "non_finite" / "step=1-rank=0.jsonl"


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    """Starting one fails."""

    def refuse(*_):
        raise AssertionError("the engine was started")

    monkeypatch.setattr(VLLMEngine, "start", refuse)


def replay(capsys, tiny_model: str, folder: Path, file: Path, *more: str) -> tuple[int, str, str]:
    own = ("--model.model_name_or_path", tiny_model, "--trainer.default_root_dir", str(folder))
    try:
        return app(capsys, "replay", "--config", QUICKSTART, *own, "--rows", str(file), *more)
    except pytest.fail.Exception:  # it came back without an exit: status 0
        captured = capsys.readouterr()
        return 0, captured.out, captured.err


def checkpoint(tiny_model: str, folder: Path) -> Path:
    """A checkpoint with one infinite weight."""
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        policy.get_submodule(PLANTED).weight[3, 5] = math.inf
    path = folder / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    torch.save({"state_dict": {f"policy.{name}": value for name, value in policy.state_dict().items()}}, path)
    return path


def test_the_model_itself_is_fine(tiny_model, tmp_path, file, capsys):
    code, printed, stderr = replay(capsys, tiny_model, tmp_path, file)
    assert code == 0, stderr
    lines = printed.splitlines()
    assert f"policy       {tiny_model}" in lines
    assert any(line.startswith("setting      model.loss.max_completion_length=8, in the step null") for line in lines)
    assert any(line.endswith("'1 + 2'  '3 4 5'") for line in lines)
    assert lines[-1].startswith("verdict      all finite in float32")


def test_a_checkpoint_with_a_bad_weight_is_named(tiny_model, tmp_path, file, capsys):
    path = checkpoint(tiny_model, tmp_path)
    code, printed, _ = replay(capsys, tiny_model, tmp_path, file, "--ckpt_path", "last")
    assert code == 1
    assert f"policy       {path}" in printed.splitlines()
    last = printed.splitlines()[-1]
    assert last.startswith(f"verdict      NOT FINITE: weights, first {PLANTED}.weight")
    assert f"first at {PLANTED} (its weight is not finite)" in last


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": "nothing.jsonl"}, "^--rows: cannot read nothing.jsonl"),
        ({"ckpt_path": "nothing.ckpt"}, "^--ckpt_path: nothing.ckpt does not exist$"),
        ({"ckpt_path": "last"}, "^--ckpt_path last: there is no checkpoint"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(tiny_model, tmp_path, file, given, said):
    trainer = LockstepTrainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(LockstepError, match=said):
        trainer.replay(GRPOModule(tiny_model), **{"rows": str(file), **given})
