"""A DeepSpeed engine's checkpoints: folders written whole, and loaded whatever wrote them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from app.checkpoint.files import SaveError, give_name, reason, sync_folder, unfinished
from app.checkpoint.state import TrainingState, read_file
from app.checkpoint.universal import INNER, write_universal
from app.checkpoint.zero import ENGINE_KEYS, GROUPS, INEXACT, TAG, ZeroFolder
from app.errors import LockstepError
from app.world import World


def save_folder(engine: Any, checkpoint: Mapping[str, Any], path: Path, world: World, *, exclude_frozen: bool) -> None:
    """Write the engine's state and Lightning's checkpoint as the folder `path`. All ranks must call it together.

    Raises:
        SaveError: on all ranks, if one of them cannot write. Nothing is left behind.
    """
    from app.checkpoint.durable_engine import durable_writes

    temporary = unfinished(path)

    def prepare() -> None:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def finish() -> None:
        if world.rank == 0:
            (temporary / "latest").write_text(TAG)
            for folder in (temporary / TAG, temporary):
                sync_folder(folder)
            give_name(path)

    own = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    own[GROUPS] = parameter_groups(engine)
    try:
        world.together(prepare, SaveError, reason=reason)
        with durable_writes(engine) as writer:
            engine.save_checkpoint(
                str(temporary), tag=TAG, client_state=own, save_latest=False, exclude_frozen_parameters=exclude_frozen
            )
        world.together(writer.check, SaveError, reason=reason)
        world.together(finish, SaveError, reason=reason)
    except SaveError:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def load_training(engine: Any, path: Path, scratch: Path, world: World) -> dict[str, Any]:
    """Load weights and optimiser states into the engine; return Lightning's part. All ranks must call it together.

    DeepSpeed itself loads a folder that as many processes wrote under the same ZeRO stage and precision. Everything
    else, also a file of a single process or DDP, is turned into a universal checkpoint first.

    Args:
        engine: the DeepSpeed engine that is to train.
        path: a DeepSpeed folder or a checkpoint file.
        scratch: folder, seen by all ranks, for the universal checkpoint; it is deleted afterwards.
        world: the ranks.

    Raises:
        LockstepError: if the checkpoint is of another model, or there is no room for the universal one.
    """
    folder = ZeroFolder(path) if path.is_dir() else None
    if folder is not None:
        _check_names(engine.module, folder.names, path)
    layout = (engine.zero_optimization_stage(), world.size, engine.bfloat16_enabled())
    if folder is not None and (folder.stage, folder.size, folder.bfloat16) == layout:
        _, client = engine.load_checkpoint(str(path), load_lr_scheduler_states=False)
        lightning = {key: value for key, value in client.items() if key not in (*ENGINE_KEYS, GROUPS)}
    else:
        state = folder.state() if folder is not None else read_file(path, parameter_groups(engine))
        rank_zero_info(
            f"{path.name} was written by {folder.origin if folder is not None else 'another strategy'} and is "
            f"converted; {INEXACT}"
        )
        _load_universal(engine, state, scratch, world)
        _copy_buffers(engine.module, folder.buffers if folder is not None else _state_dict(path))
        lightning = state.lightning
    engine.optimizer.clip_grad = engine.gradient_clipping()  # ZeRO-1 and 2 take it from the checkpoint
    return lightning


def load_weights(module: nn.Module, path: Path) -> dict[str, Any]:
    """Load only weights, for validation and test; return Lightning's part. All ranks must call it together.

    Raises:
        LockstepError: if the checkpoint is of another model.
    """
    import deepspeed

    if path.is_dir():
        folder = ZeroFolder(path)
        names, buffers, lightning = folder.names, folder.buffers, folder.state().lightning
        read: Callable[[str], Tensor] = partial(folder.read, key="fp32")
    else:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        buffers = checkpoint.pop("state_dict")
        names, lightning, read = list(buffers), checkpoint, buffers.__getitem__
    _check_names(module, names, path)
    for name, parameter in module.named_parameters():
        if name in names:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                if parameter.numel():  # under ZeRO-3 it has come together
                    parameter.copy_(read(name))
    _copy_buffers(module, buffers)
    return lightning


def parameter_groups(engine: Any) -> list[list[str]]:
    """Return the names of the parameters in the optimiser's groups, in its order."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        return [[engine.param_names[parameter] for parameter in group] for group in groups]
    names: list[list[str]] = [[] for _ in optimizer.optimizer.param_groups]
    for index, sub_group in enumerate(optimizer.fp16_groups):  # cut by size, in order
        names[optimizer.sub_group_to_group_id[index]] += [engine.param_names[parameter] for parameter in sub_group]
    return names


def _load_universal(engine: Any, state: TrainingState, scratch: Path, world: World) -> None:
    """Write the universal checkpoint on one rank and load it on all."""
    from deepspeed.utils import logger as deepspeed_log

    level = deepspeed_log.level

    def write() -> None:
        if world.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            write_universal(state, scratch)

    try:
        try:
            world.together(write, SaveError, reason=reason)
        except SaveError as error:
            raise LockstepError(
                f"--ckpt_path: going on with another number of processes or another strategy needs room for the "
                f"weights and optimiser states in {scratch.parent}: {error}"
            ) from error
        engine._config.load_universal_checkpoint = True
        deepspeed_log.setLevel(logging.ERROR)  # it warns that there is no tensor parallelism
        engine.load_checkpoint(str(scratch), tag=INNER, load_lr_scheduler_states=False)
        world.gather(None)  # all have read it
    finally:
        engine._config.load_universal_checkpoint = False
        deepspeed_log.setLevel(level)
        if world.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    # Two faults of DeepSpeed's loading into ZeRO-3 are fixed here (0.19): every group gets the first one's settings,
    # so biases would get weight decay; and all share one step counter, which each of them then counts up.
    optimizer = engine.optimizer.optimizer
    for group, settings in zip(optimizer.param_groups, state.param_groups, strict=True):
        group.update(settings)
    for own in optimizer.state.values():
        own["step"] = own["step"].clone()


def _check_names(module: nn.Module, names: list[str], path: Path) -> None:
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    missing = sorted(trained - set(names))
    if missing:
        raise LockstepError(
            f"--ckpt_path: {path} is of another model or other model.lora settings: it has no {missing[0]}"
        )


def _copy_buffers(module: nn.Module, source: Mapping[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in source:
            buffer.copy_(source[name])


def _state_dict(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
    return weights
