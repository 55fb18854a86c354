"""LockstepTrainer from Python: what the commands do, without the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from app.errors import LockstepError
from app.trainer import LockstepTrainer
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from callbacks.rollout_checkpoint import RolloutCheckpoint
from callbacks.run_summary import RunSummary
from tests.conftest import FakeEngine
from tests.training.resume_run import Saver
from tests.training.tiny_runs import tiny_data, write_prompts


def fit(model: str, folder: Path, max_steps: int, *callbacks: Callback, **arguments: Any) -> dict[str, torch.Tensor]:
    """Train in the run folder `run`; return the weights."""
    seed_everything(1)
    folder.mkdir(exist_ok=True)
    saver = Saver({})
    trainer = LockstepTrainer(
        default_root_dir=str(folder / "run"),
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[saver, RunSummary(), *callbacks],
    )
    module = GRPOModule(model, optim=OptimConfig(learning_rate=1e-2))
    data = tiny_data(model, write_prompts(folder), FakeEngine(), prompts_per_rollout=4)
    trainer.fit(module, data, **arguments)  # as Lightning takes a data module, too
    return saver.weights


def test_a_run_from_python_goes_on_from_last_and_ends_as_if_undisturbed(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = fit(tiny_model, tmp_path / "whole", 4, RolloutCheckpoint())
    fit(tiny_model, tmp_path / "parts", 2, RolloutCheckpoint())
    last = tmp_path / "parts" / "run" / "checkpoints" / "last.ckpt"
    assert last.resolve().name == "step=2.ckpt"  # in the run folder, as on the command line
    assert f"checkpoint   {last}" in capsys.readouterr().out
    resumed = fit(tiny_model, tmp_path / "parts", 4, RolloutCheckpoint(), ckpt_path="last")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert json.loads((tmp_path / "parts" / "run" / "summary.json").read_text())["steps"] == 4


def test_last_is_looked_for_where_the_checkpoints_were_told_to_be(tiny_model: str, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    fit(tiny_model, tmp_path, 2, RolloutCheckpoint(dirpath=elsewhere))
    with pytest.raises(LockstepError, match=r"nothing was trained: the checkpoint is at step 2"):
        fit(tiny_model, tmp_path, 2, RolloutCheckpoint(dirpath=elsewhere), ckpt_path="last")


def test_a_checkpoint_that_is_not_there_is_said(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"--ckpt_path: .*nothing\.ckpt does not exist"):
        fit(tiny_model, tmp_path, 2, ckpt_path="nothing.ckpt")
