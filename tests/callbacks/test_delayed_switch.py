"""A correction that rows must be scored for is switched on when the rollout is over, also in a run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from app.guards.rules import Rule
from app.maths.objective import LossConfig
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from app.training.settings import CorrectionSettings
from callbacks.mismatch_guard import MismatchGuard
from tests.callbacks.test_mismatch_guard import Watch
from tests.conftest import FakeEngine
from tests.training.resume_run import Memory, Saver
from tests.training.tiny_runs import quiet_trainer, tiny_data, write_prompts

NONE = CorrectionSettings(preset=None)
REJECTING = CorrectionSettings(preset=None, level="token", upper=2.0, rejection=[{"level": "token", "upper": 3.0}])
SWITCHES = {
    "sums over the step": (NONE, REJECTING, LossConfig(denominator="kept"), 6),
    "old log-probabilities": (CorrectionSettings(preset="verl/bypass"), CorrectionSettings(), LossConfig(), 6),
    "a mean weight": (NONE, CorrectionSettings(batch_normalize=True), LossConfig(), 6),
    "nothing of the rows": (NONE, CorrectionSettings(), LossConfig(), 2),
}
"""What the new correction needs: the old one, the new one, the loss, micro-batches until it may begin. The rule fires
at the first of 3 steps of a rollout, each of 2 micro-batches."""


def fit(model: str, folder: Path, name: str, stops: dict[int, Path], start: Path | None = None) -> dict[str, Any]:
    own, new, loss, _ = SWITCHES[name]
    seed_everything(1)
    saver, memory, watch = Saver(stops), Memory(), Watch()
    rule = Rule(metric="k3_kl", above=-1e9, patience=1, actions=["correct", "lower_learning_rate"], keep=True, name="r")
    optim = OptimConfig(learning_rate=1e-3, lr_scheduler_type="constant")
    trainer = quiet_trainer(
        default_root_dir=str(folder),
        logger=[memory],
        callbacks=[MismatchGuard([rule], correction=new), saver, watch],
        max_steps=7,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    trainer.fit(
        GRPOModule(model, loss=loss, optim=optim, correction=own),
        datamodule=tiny_data(model, write_prompts(folder), FakeEngine(), prompts_per_rollout=6, mini_batches=3),
        ckpt_path=start,
    )
    return {"weights": saver.weights, "logged": memory.values, "levels": watch.levels}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_switch_waits_as_long_as_it_must_and_survives_a_resume(tiny_model: str, tmp_path: Path, name: str) -> None:
    own, new, _, first = SWITCHES[name]
    stops = {stop: tmp_path / f"{stop}.ckpt" for stop in (2, 3, 4, 6, 7)}
    whole = fit(tiny_model, tmp_path, name, stops)
    assert set(whole["levels"][:first]) == {own.resolve().level}
    assert set(whole["levels"][first:]) == {new.resolve().level}
    for stop, path in stops.items():
        resumed = fit(tiny_model, tmp_path, name, {}, start=path)
        for key, tensor in whole["weights"].items():
            assert torch.equal(resumed["weights"][key], tensor), (stop, key)
        assert {step: whole["logged"][step] for step in resumed["logged"]} == resumed["logged"]
