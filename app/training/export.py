"""A checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from app.checkpoint.weights import read_weights
from app.data.tokenizer import load_tokenizer
from app.errors import LockstepError
from app.training.adapters import merge_adapters, save_adapters
from app.training.module import GRPOModule

PREFIX = "policy."


def export_checkpoint(module: GRPOModule, checkpoint: Path, out: Path) -> Path:
    """Write weights (safetensors), configuration, tokenizer, chat template and generation config to `out`.

    LoRA adapters are merged into the weights; alone they are in `out`/lora, as peft reads them.

    Args:
        module: not set up yet.
        checkpoint: a file, or a DeepSpeed folder of any ZeRO stage.
        out: folder to write.

    Raises:
        LockstepError: if the checkpoint is of another model.
    """
    module.setup("export")
    load_checkpoint_weights(module, checkpoint)
    if module.lora is not None:
        save_adapters(module.policy, out / "lora", module.model_name_or_path)
        merge_adapters(module.policy)
    module.policy.config.use_cache = True  # training switched it off
    module.policy.save_pretrained(out)
    load_tokenizer(module.model_name_or_path).save_pretrained(out)
    for file in out.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors writes for the owner only, but a server may run as somebody else
    return out


def load_checkpoint_weights(module: GRPOModule, checkpoint: Path) -> None:
    """Load the policy of a checkpoint, a file or a DeepSpeed folder, into a module that was set up.

    Raises:
        LockstepError: if the checkpoint is of another model.
    """
    state = read_weights(checkpoint)
    weights = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
    try:
        module.policy.load_state_dict(weights)
    except RuntimeError as error:
        raise LockstepError(f"{checkpoint} does not fit {module.model_name_or_path!r}: {error}") from error
