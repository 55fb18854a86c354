"""DeepSpeed under its usual names, also on machines without CUDA."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn

from app.checkpoint.deepspeed import load_training, load_weights, save_folder
from app.errors import LockstepError
from app.world import HasWorld, World

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported; else it guesses, with a warning

FORMS: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "deepspeed_stage_1": {"stage": 1},
    "deepspeed_stage_2": {"stage": 2},
    "deepspeed_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "deepspeed_stage_3": {"stage": 3},
    "deepspeed_stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "deepspeed_stage_3_offload_nvme": {
        **{"stage": 3, "offload_optimizer": True, "offload_parameters": True, "remote_device": "nvme"},
        **{"offload_params_device": "nvme", "offload_optimizer_device": "nvme"},
    },
}
"""Name of a strategy and the arguments it stands for, as Lightning has them."""

FROM_TRAINER = {
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "optimizer": "model.optim",
    "scheduler": "model.optim.lr_scheduler_type",
    "train_batch_size": "data.prompts_per_rollout, data.num_generations and data.mini_batches",
}
"""Key of a DeepSpeed configuration -> the setting that decides it here."""

UNSAFE = (
    ("bf16", "check_grad_overflow", False),
    ("zero_optimization", "compute_grad_norm", False),
)
"""Section, key and value of a DeepSpeed configuration with which it does not look at the norm of the gradient."""


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy with settings that cannot contradict the Trainer's."""

    def setup(self, trainer: Trainer) -> None:
        """Check the configuration, then set up.

        Raises:
            LockstepError: if the DeepSpeed configuration sets what another setting decides.
        """
        config = self.config
        assert isinstance(config, dict)
        # torch's AdamW serves offloaded states too; DeepSpeed would refuse any optimiser but its own compiled one
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        config.setdefault("zero_allow_untested_optimizer", True)  # Lightning's default; a configuration may lack it
        if not self._config_initialized:
            check_deepspeed_config(config, trainer.gradient_clip_val)
        if str(trainer.precision).startswith("16-"):
            raise LockstepError(
                f"trainer.precision={trainer.precision}: DeepSpeed's search for a float16 loss scale would take every "
                f"step that is left out for an overflow; use bf16-mixed, or trainer.strategy=ddp"
            )
        super().setup(trainer)

    @property
    def _world(self) -> World:
        """The ranks, as the module that is trained knows them."""
        return cast(HasWorld, self.lightning_module).world

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a folder, whole or not at all.

        Raises:
            SaveError: on all ranks, if one of them cannot write.
        """
        save_folder(
            self.deepspeed_engine,
            checkpoint,
            Path(self.broadcast(filepath)),
            self._world,
            exclude_frozen=self.exclude_frozen_parameters,
        )

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load any checkpoint: a folder, whatever ZeRO stage and number of processes wrote it, or another's file.

        Raises:
            LockstepError: if it is of another model.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return load_weights(self.lightning_module, Path(checkpoint_path))
        scratch = Path(trainer.default_root_dir) / "checkpoints" / ".resume.ckpt.tmp"  # cleared away like the others
        return load_training(self.deepspeed_engine, Path(checkpoint_path), scratch, self._world)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to load; Lightning would, with load_full_weights."""

    def teardown(self) -> None:
        """Take the engine apart: under ZeRO-3 its hooks would stay on the modules and disturb the next one's."""
        engine: Any = self.model
        super().teardown()
        if hasattr(engine, "destroy"):
            engine.destroy()


class CPUZeroStrategy(ZeroStrategy):
    """The same on CPUs: processes that communicate through gloo.

    Lightning refuses DeepSpeed without CUDA at three places, which are passed by here. DeepSpeed itself runs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(*args, **kwargs)

    @property
    def root_device(self) -> torch.device:
        """The CPU, with the index that DeepSpeed wants to see."""
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        """Set up as DDP does: Lightning's own method wants CUDA."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Start the process group."""
        import deepspeed.ops

        # A faster all-reduce for inference, compiled at start for a minute; nothing here uses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def check_deepspeed_config(config: dict[str, Any], gradient_clip_val: float | None) -> None:
    """Refuse what another setting decides.

    Raises:
        LockstepError: naming both keys.
    """
    for key, setting in FROM_TRAINER.items():
        if key in config:
            raise LockstepError(f"trainer.strategy: remove {key} from the DeepSpeed configuration; set {setting}")
    clip = config.get("gradient_clipping")
    for section, key, value in UNSAFE:
        if config.get(section, {}).get(key) == value:
            raise LockstepError(
                f"trainer.strategy: remove {section}.{key}={value} from the DeepSpeed configuration: without it a step "
                f"could not be left out when its gradient is not finite or nothing was left to train on"
            )
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 1 and config.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        raise LockstepError("trainer.strategy: data_types.grad_accum_dtype=fp32 works with ZeRO 2 and 3 only")
    if clip is not None and clip != (gradient_clip_val or 0.0):
        raise LockstepError(
            f"trainer.strategy: gradient_clipping={clip} in the DeepSpeed configuration contradicts "
            f"trainer.gradient_clip_val={gradient_clip_val}; remove it there"
        )


def check_name(name: str) -> None:
    """Refuse the name of a strategy that does not exist.

    Raises:
        LockstepError: with the nearest names.
    """
    known = StrategyRegistry.available_strategies()
    if name != "auto" and name not in known:
        near = difflib.get_close_matches(name, known) or ["ddp", "deepspeed_stage_2", "deepspeed_stage_3"]
        raise LockstepError(f"trainer.strategy={name}: there is no such strategy; did you mean {' or '.join(near)}?")


def check_strategy(strategy: Strategy, gradient_clip_val: float | None) -> None:
    """Refuse strategies whose weights or checkpoints are not what the rest of Lockstep expects.

    Raises:
        LockstepError: naming what to use.
    """
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        raise LockstepError(
            f"trainer.strategy: {type(strategy).__name__} is not supported; shard with deepspeed_stage_2 or _3"
        )
    if isinstance(strategy, DeepSpeedStrategy) and not isinstance(strategy, ZeroStrategy):
        raise LockstepError(
            "trainer.strategy: with a class_path use app.distributed.strategies.ZeroStrategy (on CPUs "
            "CPUZeroStrategy), which takes the arguments of Lightning's DeepSpeedStrategy and writes checkpoints whole"
        )
    if isinstance(strategy, ZeroStrategy) and isinstance(strategy.config, dict):
        check_deepspeed_config(strategy.config, gradient_clip_val)


def register_strategies() -> None:
    """Replace Lightning's `deepspeed_stage_1`, `_2`, `_3` and offload forms; add `deepspeed_cpu_stage_1`, `_2`, `_3`.

    On a machine without CUDA the plain name means the CPU form.
    """
    plain = ZeroStrategy if torch.cuda.is_available() else CPUZeroStrategy
    for name, arguments in FORMS.items():
        StrategyRegistry.register(name, plain, description="DeepSpeed ZeRO", override=True, **arguments)
    for stage in (1, 2, 3):
        StrategyRegistry.register(
            f"deepspeed_cpu_stage_{stage}", CPUZeroStrategy, description="DeepSpeed ZeRO", override=True, stage=stage
        )
