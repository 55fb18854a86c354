"""LoRA adapters (arXiv:2106.09685) by peft: put into a policy, switched off for the reference, merged for export.

The engine is sent merged weights (see app.weights.gather), though vLLM could serve adapters by themselves: so every
weight it computes with has a checksum that proves it is the trainer's, one path serves every engine, and sampling
costs no extra products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from app.errors import LockstepError
from app.weights.gather import tied_names
from app.weights.lora import lora_layers, weights

ADAPTER_NAME = "default"
"""The adapter's name inside peft's layers; its files do not have it."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters, by the names of peft's LoraConfig.

    There is no lora_dropout: the engine samples without it, so it would part the trainer from the engine.
    """

    r: int = 8
    """Rank of the adapters."""
    lora_alpha: int = 8
    """The adapters' product is multiplied by lora_alpha / r."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers to adapt: the ends of their names, e.g. [q_proj, v_proj]; a regular expression for whole names; or
    all-linear, every one but the head."""
    use_rslora: bool = False
    """Multiply by lora_alpha / √r instead (arXiv 2312.03732)."""

    def __post_init__(self) -> None:
        for name in ("r", "lora_alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.lora.{name}={getattr(self, name)}: must be above 0")


def add_adapters(policy: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters into `policy`, in place, and freeze all else. At first they change nothing (B = 0).

    The model keeps its class. The adapters are float32. A is drawn by the run's seed, equally on every rank.

    Raises:
        LockstepError: if `target_modules` names no linear layer, another kind of layer, or a head tied to the
            embedding, which the adapter would part from it.
    """
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        try:
            inject_adapter_in_model(LoraConfig(**asdict(settings)), policy, ADAPTER_NAME)
        except ValueError as error:
            raise LockstepError(f"model.lora.target_modules={settings.target_modules}: {error}") from error
    policy.requires_grad_(False)
    tied = tied_names(policy)
    shared = {*tied, *tied.values()}
    for name, layer in lora_layers(policy):
        if not isinstance(layer.base_layer, nn.Linear):
            raise LockstepError(
                f"model.lora.target_modules={settings.target_modules}: {name} is no linear layer; leave it out"
            )
        if f"{name}.weight" in shared:
            raise LockstepError(
                f"model.lora.target_modules={settings.target_modules}: {name} shares its weight with another layer, "
                f"as a head tied to the embedding does; leave it out"
            )
        for part in (layer.lora_A, layer.lora_B):
            # Whatever the model's dtype: a bfloat16 weight forgets most updates of a small learning rate.
            part.float().requires_grad_(True)
    policy.eval()


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Let `policy` compute as before its adapters were added; without adapters nothing happens."""
    layers = [layer for _, layer in lora_layers(policy)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge_adapters(policy: PreTrainedModel) -> None:
    """Make `policy` a plain model with the merged weights, in place and for good: for export, never while training.

    The sums are those that the engine is sent. A second call finds no adapter.
    """
    full = {weight.name: weight for weight in weights(policy)}
    for name, layer in list(lora_layers(policy)):
        base = layer.base_layer
        base.weight.copy_(full[f"{name}.weight"].full())
        policy.set_submodule(name, base)


def save_adapters(policy: PreTrainedModel, folder: Path, model_name_or_path: str) -> None:
    """Write the adapters alone to `folder`, as peft's `PeftModel.from_pretrained` reads them."""
    (config,) = policy.peft_config.values()
    config.base_model_name_or_path = model_name_or_path
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)[ADAPTER_NAME].weight.detach().contiguous()
        for name, layer in lora_layers(policy)
        for part in ("lora_A", "lora_B")
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
