"""A checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from app.checkpoint.files import reason, unfinished
from app.errors import LockstepError
from app.policy.lora import merge_adapters, save_adapters
from app.policy.saving import save_policy
from app.training.module import GRPOModule
from app.training.restore import load_checkpoint_weights


def export_checkpoint(module: GRPOModule, checkpoint: Path, out: Path) -> Path:
    """Write weights (safetensors), configuration, tokenizer, chat template and generation config to `out`.

    LoRA adapters are merged into the weights; alone they are in `out`/lora, as peft reads them.

    Args:
        module: not set up yet.
        checkpoint: a file, or a DeepSpeed folder of any ZeRO stage.
        out: folder to write.

    Raises:
        LockstepError: if the checkpoint is of another model, or `out` cannot be written; nothing is left behind then.
    """
    module.setup("export")
    load_checkpoint_weights(module, checkpoint)
    temporary = unfinished(out)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write(module, temporary)
        _move(temporary, out)
    except (OSError, SafetensorError) as error:
        raise LockstepError(f"--out: cannot write {out}: {reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write(module: GRPOModule, folder: Path) -> None:
    if module.lora is not None:
        save_adapters(module.policy, folder / "lora", module.model_name_or_path)
        merge_adapters(module.policy)
    save_policy(module.policy, module.model_name_or_path, folder)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors writes for the owner only, but a server may run as somebody else


def _move(source: Path, target: Path) -> None:
    """Move what is in `source` into `target`, over what has the same name there."""
    target.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            shutil.rmtree(target / item.name, ignore_errors=True)
        os.replace(item, target / item.name)
