"""The order of one optimiser step, as StepLog says it: recorded while a run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from app.errors import LockstepError
from app.guards.run_control import RunControl
from app.rollout.sampler import GroupSampler
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from tests.conftest import FakeEngine
from tests.training.resume_run import Memory
from tests.training.test_module import Bookkeeper
from tests.training.tiny_runs import quiet_trainer, tiny_data, write_prompts


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order."""
    found: list[str] = []

    def noted(owner: type, name: str, word: str) -> None:
        original = getattr(owner, name)

        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(word)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    noted(GroupSampler, "sample", "sampled")
    noted(GRPOModule, "training_step", "forward")
    noted(GRPOModule, "on_before_optimizer_step", "judged")
    noted(torch.optim.lr_scheduler.LambdaLR, "step", "scheduled")
    noted(RunControl, "see", "seen")
    noted(RunControl, "apply", "applied")
    noted(Memory, "log_metrics", "logged")
    noted(GRPOModule, "on_train_batch_end", "module")
    return found


class Watch(Bookkeeper):
    """The callbacks' place in the order, and that the weights have moved by then."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        optimiser = trainer.optimizers[0]
        optimiser.register_step_post_hook(lambda *_: self.events.append("moved"))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.events.append("callback")


def test_the_order_of_an_optimiser_step(tiny_model: str, tmp_path: Path, events: list[str]) -> None:
    seed_everything(1)
    watch = Watch(events)
    trainer = quiet_trainer(
        default_root_dir=str(tmp_path),
        max_steps=4,
        log_every_n_steps=2,
        accumulate_grad_batches=2,
        logger=[Memory()],
        callbacks=[watch],
    )
    module = GRPOModule(tiny_model, optim=OptimConfig(learning_rate=1e-3))
    data = tiny_data(tiny_model, write_prompts(tmp_path), FakeEngine(), prompts_per_rollout=4, mini_batches=2)
    trainer.fit(module, datamodule=data)
    inside = ["forward", "callback", "module"]  # a micro-batch that does not complete the step
    silent = ["forward", "judged", "moved", "scheduled", "applied", "callback", "module"]
    spoken = ["forward", "judged", "moved", "scheduled", "seen", "applied", "callback", "module", "logged"]
    rollout = ["sampled", *inside, *silent, *inside, *spoken]
    assert events[events.index("sampled") :] == [*rollout, *rollout]


@pytest.mark.parametrize("schedule", [None, {"interval": "epoch"}, {"interval": "step", "frequency": 2}])
def test_a_module_whose_schedule_does_not_step_with_every_step_is_refused(
    tiny_model: str, tmp_path: Path, schedule: dict[str, Any] | None
) -> None:
    class Own(GRPOModule):
        def configure_optimizers(self) -> Any:
            optimiser = torch.optim.SGD(self.parameters(), lr=0.1)
            if schedule is None:
                return optimiser
            constant = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0)
            return {"optimizer": optimiser, "lr_scheduler": {"scheduler": constant, **schedule}}

    trainer = quiet_trainer(default_root_dir=str(tmp_path), max_steps=2)
    data = tiny_data(tiny_model, write_prompts(tmp_path), FakeEngine(), prompts_per_rollout=4)
    with pytest.raises(LockstepError, match="one learning-rate schedule with interval 'step' and frequency 1"):
        trainer.fit(Own(tiny_model), datamodule=data)


def test_a_step_that_nobody_closed_ends_the_run_in_a_line(tiny_model: str, tmp_path: Path) -> None:
    class Own(GRPOModule):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    trainer = quiet_trainer(default_root_dir=str(tmp_path), max_steps=2)
    data = tiny_data(tiny_model, write_prompts(tmp_path), FakeEngine(), prompts_per_rollout=4)
    with pytest.raises(LockstepError, match="optimiser step 1 was not closed"):
        trainer.fit(Own(tiny_model), datamodule=data)
