"""Optimiser and learning-rate schedule, by the names of transformers' TrainingArguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from app.errors import LockstepError

Schedule = Literal["constant", "constant_with_warmup", "inverse_sqrt", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    learning_rate: float = 1e-6
    """Peak of the learning-rate schedule."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only (not on biases and norms)."""
    adam_beta1: float = 0.9
    """Decay of the gradient's mean."""
    adam_beta2: float = 0.999
    """Decay of the gradient's second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    lr_scheduler_type: Schedule = "constant_with_warmup"
    """Shape of the schedule. inverse_sqrt falls from the end of the warm-up on, whatever the length of the run; linear
    and cosine fall to 0 at its last step."""
    warmup_steps: int = 0
    """Optimiser steps over which the rate rises linearly from 0."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "adam_epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.optim.{name}={getattr(self, name)}: must be above 0")
        for name in ("weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.optim.{name}={getattr(self, name)}: must not be negative")
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError("model.optim.warmup_steps: the constant schedule has none; use constant_with_warmup")
        if self.lr_scheduler_type == "inverse_sqrt" and not self.warmup_steps:
            raise ValueError(
                "model.optim.lr_scheduler_type=inverse_sqrt: falls from the end of warmup_steps on; set it"
            )


def build_optimiser(parameters: Iterable[nn.Parameter], config: OptimConfig) -> Optimizer:
    """Return AdamW with weight decay on matrices only."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
    )


def build_schedule(optimiser: Optimizer, config: OptimConfig, total_steps: float) -> LRScheduler:
    """Return the schedule over `total_steps` optimiser steps; only linear and cosine depend on them.

    Raises:
        LockstepError: if a schedule that ends has no end.
    """
    if not math.isfinite(total_steps) and config.lr_scheduler_type in ("linear", "cosine"):
        raise LockstepError(f"model.optim.lr_scheduler_type={config.lr_scheduler_type}: set trainer.max_steps")
    steps = int(total_steps) if math.isfinite(total_steps) else None
    return get_scheduler(
        config.lr_scheduler_type, optimiser, num_warmup_steps=config.warmup_steps, num_training_steps=steps
    )
