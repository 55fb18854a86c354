"""What the runs of the tiny model have in common."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from app.data.sources import PromptSource
from app.distributed.strategies import register_strategies
from app.engine.protocol import Engine
from app.rewards.weighted_sum import RewardSpec
from app.rollout.datamodule import RolloutDataModule
from app.types import SamplingConfig


def write_prompts(folder: Path) -> str:
    """Write 8 prompts and return their path."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    return str(path)


def digits(completions, **columns):
    """Rewards digits: rows of one group differ."""
    return [sum(c.isdigit() for c in text) / 6 for text in completions]


def tiny_data(model: str, prompts: str, engine: Engine, temperature: float = 1.0, **settings: Any) -> RolloutDataModule:
    """Prompts and rewards for the tiny model; `settings` say how rollouts are cut."""
    return RolloutDataModule(
        rewards=[RewardSpec(function="tests.training.tiny_runs.digits")],
        train=PromptSource(path=prompts),
        model_name_or_path=model,
        engine=engine,
        sampling=SamplingConfig(max_tokens=6, temperature=temperature),
        **{"num_generations": 4, **settings},
    )


def quiet_trainer(**settings: Any) -> Trainer:
    """A Trainer on CPUs that shows and keeps nothing but what `settings` ask for."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(**{**quiet, **settings})


def join(rank: int, port: int) -> None:
    """Make this process one of those that Lightning takes for launched by somebody else."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    register_strategies()
