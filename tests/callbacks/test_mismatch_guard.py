"""MismatchGuard and AdaptiveThreshold in runs of the tiny model, whose fake engine samples from another policy."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from app.engine.protocol import Engine
from app.errors import LockstepError
from app.guards.mismatch_guard import Event, Guard
from app.guards.rules import Rule
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from app.training.settings import CorrectionSettings
from callbacks.adaptive_threshold import AdaptiveThreshold
from callbacks.mismatch_guard import MismatchGuard
from callbacks.rollout_checkpoint import RolloutCheckpoint
from tests.conftest import FakeEngine
from tests.training.resume_run import Memory, Saver
from tests.training.tiny_runs import quiet_trainer, tiny_data, write_prompts

NONE = CorrectionSettings(preset=None)
STEPS = 6


class Watch(Callback):
    """Notes what is in force for each micro-batch."""

    def __init__(self) -> None:
        self.levels: list[str] = []
        self.uppers: list[float | None] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.levels.append(pl_module.run_control.correction.level)
        self.uppers.append(pl_module.run_control.correction.upper)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(
    model: str,
    folder: Path,
    *callbacks: Callback,
    correction: CorrectionSettings = NONE,
    engine: Engine | None = None,
    start: Path | None = None,
    stops: dict[int, Path] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train 6 steps of 2 micro-batches, 2 steps a rollout."""
    seed_everything(1)
    saver, memory, watch = Saver(stops or {}), Memory(), Watch()
    module = GRPOModule(
        model, optim=OptimConfig(learning_rate=1e-3, lr_scheduler_type="constant"), correction=correction
    )
    datamodule = tiny_data(model, write_prompts(folder), engine or FakeEngine(), prompts_per_rollout=4, mini_batches=2)
    given = {"max_steps": STEPS, "accumulate_grad_batches": 2, "log_every_n_steps": 1, **settings}
    trainer = quiet_trainer(
        default_root_dir=str(folder),
        logger=[memory, TensorBoardLogger(folder, name="", version="log")],
        callbacks=[*callbacks, saver, watch],
        **given,
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=start)
    return {"weights": saver.weights, "logged": memory.values, "watch": watch}


def rule(*actions: str, patience: int = 2, above: float = 0.0, **settings: Any) -> Rule:
    """One that k3_kl of the fake engine, about 1, is always beyond."""
    return Rule(metric="k3_kl", above=above, patience=patience, actions=list(actions), name="rule", **settings)  # type: ignore[arg-type]


def test_it_warns_once_and_shows_where_the_rule_is(tiny_model: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"k3_kl = .* > 0 at step 2, beyond it since step 1") as caught:
        found = fit(tiny_model, tmp_path, MismatchGuard([rule("warn")]))
    assert sum("mismatch_guard" in str(warning.message) for warning in caught) == 1
    shown = [found["logged"][step]["mismatch_guard/rule"] for step in range(1, STEPS + 1)]
    assert shown == [1, 2, 2, 2, 2, 2]


def test_it_says_which_correction_is_on_and_where_the_rows_are(tiny_model: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="its correction") as caught:
        fit(tiny_model, tmp_path, MismatchGuard([rule("warn", "correct", "log_rows", keep=True)]))
    (line,) = [str(warning.message) for warning in caught if "its correction" in str(warning.message)]
    assert "; its correction (level token, upper 2.0) is on; the rows that differ most are in " in line
    (path,) = tmp_path.rglob("mismatch_guard_rows.csv")
    assert str(path) in line


def test_without_rules_and_without_alarm_nothing_changes(tiny_model: str, tmp_path: Path) -> None:
    plain = fit(tiny_model, tmp_path)
    calm = fit(tiny_model, tmp_path, MismatchGuard([rule("correct", "lower_learning_rate", above=1e6)]))
    off = fit(tiny_model, tmp_path, MismatchGuard([]))
    for found in (calm, off):
        assert all(torch.equal(found["weights"][name], tensor) for name, tensor in plain["weights"].items())
    assert "mismatch_guard/rule" not in off["logged"][1]


def test_the_correction_begins_with_the_step_after_the_firing(tiny_model: str, tmp_path: Path) -> None:
    found = fit(tiny_model, tmp_path, MismatchGuard([rule("correct", keep=True)]))
    assert found["watch"].levels == ["none"] * 4 + ["token"] * 8  # never inside an accumulation window
    weights = [found["logged"][step]["rollout_correction/is_weight_max"] for step in range(1, STEPS + 1)]
    assert all(weight > 2 for weight in weights[:2])  # raw ratios
    assert all(weight <= 2 for weight in weights[2:])


def test_it_goes_back_when_the_rule_has_recovered(tiny_model: str, tmp_path: Path) -> None:
    values = iter([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])

    class Told(Guard):
        def judge(self, values_: Any, step: int) -> list[Event]:
            return super().judge({**values_, "rollout_correction/k3_kl": next(values)}, step)

    callback = MismatchGuard([rule("correct", "lower_learning_rate", above=0.5)])
    callback.guard = Told(list(callback.guard.rules.values()))
    found = fit(tiny_model, tmp_path, callback)
    assert found["watch"].levels == ["none"] * 4 + ["token"] * 4 + ["none"] * 4
    assert found["watch"].rates == pytest.approx([1e-3] * 4 + [5e-4] * 4 + [1e-3] * 4)


def test_rows_are_written_with_their_tokens(tiny_model: str, tmp_path: Path) -> None:
    fit(tiny_model, tmp_path, MismatchGuard([rule("log_rows")], rows=3))
    (path,) = tmp_path.rglob("mismatch_guard_rows.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    gaps = [float(row["mean |old - rollout| (nats)"]) for row in rows]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0
    assert {row["step"] for row in rows} == {"2"}


def test_a_stopped_run_is_saved_and_goes_on(tiny_model: str, tmp_path: Path) -> None:
    saves = RolloutCheckpoint(dirpath=str(tmp_path / "checkpoints"))
    with pytest.raises(LockstepError, match=r"at step 2, beyond it since step 1.*saved and ends"):
        fit(tiny_model, tmp_path, MismatchGuard([rule("stop")]), saves, enable_checkpointing=True)
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    with pytest.raises(LockstepError, match="at step 4, beyond it since step 3"):  # its patience begins anew
        fit(tiny_model, tmp_path, MismatchGuard([rule("stop")]), start=last)


@pytest.mark.parametrize("stop", [2, 4, 5, 6, 7, 8])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tiny_model: str, tmp_path: Path, stop: int) -> None:
    def callbacks() -> list[Callback]:
        guard = MismatchGuard([rule("correct", "lower_learning_rate", keep=True)])
        return [guard, AdaptiveThreshold(target=0.9, every_n_values=1)]

    path = tmp_path / "stop.ckpt"
    whole = fit(tiny_model, tmp_path, *callbacks(), stops={stop: path})
    resumed = fit(tiny_model, tmp_path, *callbacks(), start=path)
    assert all(torch.equal(resumed["weights"][name], tensor) for name, tensor in whole["weights"].items())
    assert {step: whole["logged"][step] for step in resumed["logged"]} == resumed["logged"]


@pytest.mark.parametrize(
    ("guard", "correction", "said"),
    [
        (MismatchGuard([rule("correct")]), CorrectionSettings(), "model.correction corrects already"),
        (
            MismatchGuard([rule("correct")], correction=CorrectionSettings(preset=None)),
            NONE,
            "corrects no other than model.correction",
        ),
    ],
)
def test_a_correction_that_would_do_nothing_is_refused_at_the_start(
    tiny_model: str, tmp_path: Path, guard: MismatchGuard, correction: CorrectionSettings, said: str
) -> None:
    with pytest.raises(LockstepError, match=said):
        fit(tiny_model, tmp_path, guard, correction=correction)


def test_the_bound_is_steered_and_the_reason_written(tiny_model: str, tmp_path: Path) -> None:
    steer = AdaptiveThreshold(target=0.95, every_n_values=2)
    found = fit(tiny_model, tmp_path, steer, correction=CorrectionSettings())
    uppers = found["watch"].uppers
    assert uppers[:4] == [2.0] * 4  # two values under the configured bound
    assert uppers[4] == pytest.approx(math.exp(math.log(2.0) / 1.25))
    shown = [found["logged"][step]["adaptive_threshold/upper"] for step in range(1, STEPS + 1)]
    assert shown == uppers[::2]
    (path,) = tmp_path.rglob("adaptive_threshold.csv")
    assert "< 0.95: upper 2 -> 1.741" in path.read_text()


def test_a_bound_that_cannot_be_steered_is_refused_at_the_start(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="no upper bound to steer"):
        fit(tiny_model, tmp_path, AdaptiveThreshold(target=0.9))
