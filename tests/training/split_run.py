"""One rollout trained on under a strategy and a cut: what the gradients, their norm and the weights are then."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything

from app.distributed.strategies import CPUZeroStrategy
from app.engine.protocol import Engine
from app.guards.run_control import Wishes
from app.maths.correction import CorrectionConfig, RejectionRule
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from app.training.settings import CorrectionSettings
from app.weights.gather import named_full_parameters
from app.world import World
from tests.training.test_module import NearEngine
from tests.training.tiny_runs import join, quiet_trainer, tiny_data

ACCUMULATE = (1, 2, 4)
STRATEGIES = ("ddp", "deepspeed_cpu_stage_1", "deepspeed_cpu_stage_2", "deepspeed_cpu_stage_3")
CLIP = 0.05
"""Below the norms here, so that every step is clipped."""


def strategy_of(name: str) -> Any:
    """The strategy; under ZeRO-3 every parameter is partitioned, however small."""
    if name != "deepspeed_cpu_stage_3":
        return name
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return CPUZeroStrategy(config={"zero_allow_untested_optimizer": True, "zero_optimization": zero})


class Recorder(Callback):
    """Keeps the full gradient and its norm before each step, and the weights after the last one."""

    def __init__(self) -> None:
        self.steps: list[dict] = []
        self.weights: dict = {}

    def on_train_start(self, trainer, pl_module):
        stage_3 = isinstance(trainer.strategy, CPUZeroStrategy) and trainer.strategy.zero_stage_3
        assert not stage_3 or not any(p.numel() for p in pl_module.policy.parameters()), "nothing was partitioned"
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.datamodule.engine.policy_version = trainer.global_step
        self.weights = {name: tensor.clone() for name, tensor in named_full_parameters(pl_module.policy)}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        engine = trainer.model if trainer.strategy.handles_gradient_accumulation else None
        if engine is None:
            read = lambda p: p.grad.clone()  # noqa: E731
        elif engine.is_gradient_accumulation_boundary():
            from deepspeed.utils import safe_get_full_grad as read
        else:
            return
        self.steps.append({name: read(p) for name, p in pl_module.policy.named_parameters()})


class Rejecting:
    """A watcher of the run that wants nothing to pass the correction once it has seen a step."""

    name, stage = "rejecting", "correction"
    rejecting = CorrectionConfig(rejection=(RejectionRule(level="token", statistic="ratio", upper=1e-9),))

    def offers(self):
        return (self.rejecting,)

    def check(self, possible):
        pass

    def see(self, values, situation):
        return Wishes(correction=self.rejecting)

    def wishes(self, asked):
        return Wishes()

    def logged(self, situation):
        return {}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class RejectEverything(Recorder):
    """From the second step on no token passes the correction; keeps the weights before it too."""

    def setup(self, trainer, pl_module, stage):
        pl_module.run_control.watch(Rejecting())

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.before = self.weights
        super().on_train_batch_end(trainer, pl_module)


class PlantNaN(Recorder):
    """Makes an advantage of the second step on rank 0 NaN; keeps the weights before it too."""

    def on_train_batch_start(self, trainer, pl_module, step, batch_idx):
        if trainer.global_step == 1 and trainer.global_rank == 0:
            step.batch.advantages[0] = torch.nan

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.before = self.weights
        super().on_train_batch_end(trainer, pl_module)


class MuteOnLastRank(NearEngine):
    """An engine that gives no log-probabilities on the last rank."""

    def _complete(self, request, sampling):
        done = super()._complete(request, sampling)
        return dataclasses.replace(done, logprobs=None) if World().rank == World().size - 1 else done


def fit(
    model: str,
    prompts: str,
    strategy: str,
    devices: int,
    *,
    accumulate: int = 1,
    recorder: Recorder | None = None,
    engine: Engine | None = None,
    **settings,
) -> dict:
    """Train two optimiser steps on one rollout; return gradients, weights and what was logged last."""
    seed_everything(1)
    recorder = recorder or Recorder()
    module = GRPOModule(
        model,
        optim=OptimConfig(learning_rate=1e-2, adam_epsilon=1e-2),  # steps that do not blow up rounding
        **settings,
    )
    # 4 and 3 prompts in the steps: 2 and 2, 2 and 1 for the ranks
    datamodule = tiny_data(model, prompts, engine or NearEngine(), prompts_per_rollout=7, mini_batches=2)
    trainer = quiet_trainer(
        default_root_dir=str(Path(prompts).parent / strategy),
        max_steps=2,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP,
        devices=devices,
        strategy=strategy_of(strategy),
        callbacks=[recorder],
    )
    trainer.fit(module, datamodule=datamodule)
    metrics = {
        name: value.item()
        for name, value in trainer.callback_metrics.items()
        if not name.startswith(("time/", "tok/s"))
    }
    return {"gradients": recorder.steps, "weights": recorder.weights, "metrics": metrics}


def table(model: str, prompts: str, strategy: str, devices: int) -> dict:
    """Every accumulation, and a bound on the tokens of a forward pass that the ranks need unequally often."""
    runs = {f"accumulate {n}": fit(model, prompts, strategy, devices, accumulate=n) for n in ACCUMULATE}
    runs["token budget"] = fit(model, prompts, strategy, devices, micro_batch_tokens=20)
    return runs


def faults(model: str, prompts: str, strategy: str, devices: int) -> dict:
    """A step that is left out; a rollout that cannot be corrected, and what should then happen."""
    keeper, planter = RejectEverything(), PlantNaN()
    rejected = fit(model, prompts, strategy, devices, accumulate=2, recorder=keeper)
    non_finite = fit(model, prompts, strategy, devices, recorder=planter)
    return {
        "rejected": rejected | {"before": keeper.before},
        "non-finite": non_finite | {"before": planter.before},
        "mute": fit(model, prompts, strategy, devices, engine=MuteOnLastRank()),
        "uncorrected": fit(model, prompts, strategy, devices, correction=CorrectionSettings(preset=None)),
    }


def worker(rank: int, model: str, prompts: str, folder: str, port: int) -> None:
    """Run every strategy as one of two processes."""
    join(rank, port)
    for strategy in STRATEGIES:
        found = table(model, prompts, strategy, devices=2) | faults(model, prompts, strategy, devices=2)
        torch.save(found, Path(folder) / f"{strategy}-{rank}.pt")
