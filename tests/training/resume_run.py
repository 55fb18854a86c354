"""Runs that stop anywhere and go on: what they logged, and their weights."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import Logger

from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from app.weights.gather import named_full_parameters
from callbacks.off_policy_mask import OffPolicyMask
from tests.conftest import FakeEngine
from tests.training.split_run import strategy_of
from tests.training.tiny_runs import join, quiet_trainer, tiny_data

STOPS = {
    "at the end of an epoch": 8,
    "between rollouts": 4,
    "inside a rollout": 6,
    "inside the first accumulation window of a rollout": 5,
    "inside the first window of an epoch": 9,
    "inside an accumulation window": 7,
}
"""Micro-batches done when the checkpoint is written: 2 a step, 2 steps a rollout, 2 rollouts an epoch."""
ELSEWHERE = 7
"""After so many of them a run goes on with another number of processes."""
STRATEGIES = ("ddp", "deepspeed_cpu_stage_2", "deepspeed_cpu_stage_3")


class Memory(Logger):
    """Keeps what is logged, by step."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, dict[str, float]] = {}

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        found = {name: value for name, value in metrics.items() if not name.startswith("time/")}
        if found:
            self.values.setdefault(step, {}).update(found)


class Saver(Callback):
    """Writes checkpoints after some micro-batches, tells the engine its version, keeps the last weights."""

    def __init__(self, stops: dict[int, Path]) -> None:
        self.stops = stops
        self.done = 0

    def on_train_start(self, trainer, pl_module):
        trainer.datamodule.engine.policy_version = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.datamodule.engine.policy_version = trainer.global_step
        self.done += 1
        if self.done in self.stops:
            trainer.save_checkpoint(self.stops[self.done])
        if trainer.global_step == trainer.max_steps:
            self.weights = {name: tensor.clone() for name, tensor in named_full_parameters(pl_module.policy)}


def fit(
    model: str,
    prompts: str,
    strategy: str,
    devices: int,
    stops: dict[int, Path],
    start: Path | None = None,
    max_epochs: int | None = None,
) -> dict:
    """Train 6 steps, writing checkpoints at `stops`, or from `start` on."""
    seed_everything(1)
    saver, memory = Saver(stops), Memory()
    module = GRPOModule(model, optim=OptimConfig(learning_rate=1e-2), off_policy_sequence_mask_delta=0.01)
    datamodule = tiny_data(model, prompts, FakeEngine(), prompts_per_rollout=5, mini_batches=2)
    trainer = quiet_trainer(
        default_root_dir=str(Path(prompts).parent),
        max_steps=6,
        max_epochs=max_epochs,
        log_every_n_steps=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        devices=devices,
        strategy=strategy_of(strategy),
        logger=memory,
        callbacks=[OffPolicyMask(every_n_steps=3, rows=2), saver],
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=start)
    return {"weights": saver.weights, "logged": memory.values}


def runs(model: str, prompts: str, strategy: str, devices: int, folder: Path) -> dict:
    """The undisturbed run, and one from each of its checkpoints on."""
    paths = {name: folder / f"{strategy}-{devices}-{stop}.ckpt" for name, stop in STOPS.items()}
    stops = {stop: paths[name] for name, stop in STOPS.items()}
    found = {"undisturbed": fit(model, prompts, strategy, devices, stops)}
    found |= {name: fit(model, prompts, strategy, devices, {}, path) for name, path in paths.items()}
    path = paths["inside a rollout"]
    return found | {"with a number of epochs": fit(model, prompts, strategy, devices, {}, path, max_epochs=5)}


def worker(rank: int, model: str, prompts: str, folder: str, port: int) -> None:
    """Run every strategy as one of two processes."""
    join(rank, port)
    for strategy in STRATEGIES:
        found = runs(model, prompts, strategy, 2, Path(folder))
        found["from one process"] = fit(model, prompts, strategy, 2, {}, Path(folder) / f"auto-1-{ELSEWHERE}.ckpt")
        torch.save(found, Path(folder) / f"{strategy}-{rank}.pt")
