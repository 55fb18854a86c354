"""A checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from app.data.tokenizer import load_tokenizer
from app.errors import LockstepError
from app.training.module import GRPOModule

PREFIX = "policy."


def export_checkpoint(module: GRPOModule, checkpoint: Path, out: Path) -> Path:
    """Write weights (safetensors), configuration, tokenizer, chat template and generation config to `out`.

    Raises:
        LockstepError: if there is no such checkpoint or it is of another model.
    """
    if not checkpoint.exists():
        raise LockstepError(f"--ckpt_path: no checkpoint at {checkpoint}")
    if checkpoint.is_dir():
        raise LockstepError(
            f"--ckpt_path: {checkpoint} is a DeepSpeed folder: make one file of it with its zero_to_fp32.py"
        )
    module.setup("export")
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    weights = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
    try:
        module.policy.load_state_dict(weights)
    except RuntimeError as error:
        raise LockstepError(f"{checkpoint} does not fit {module.model_name_or_path!r}: {error}") from error
    module.policy.config.use_cache = True  # training switched it off
    module.policy.save_pretrained(out)
    load_tokenizer(module.model_name_or_path).save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner only, but a server may run as somebody else
    return out
