"""Names of parameters and routers: from the trainer's module to the Hugging Face name that an engine expects.

Llama, Mistral, Qwen2, Qwen3 and SmolLM carry their Hugging Face names in the trainer already; only what wrappers
add must go.
"""

from __future__ import annotations

import torch
from torch import nn

PREFIXES = ("_forward_module.", "module.", "base_model.model.")
"""Put in front by Lightning's strategies, by DistributedDataParallel and DeepSpeed, and by peft's PeftModel."""
INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "base_layer.")
"""Put in by torch.compile, activation checkpointing, FSDP and peft's adapted layers, wherever they wrap a submodule."""


def hf_name(name: str) -> str:
    """Return `name` without the parts that wrappers add."""
    for infix in INFIXES:
        name = name.replace(infix, "")
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


ROUTER_NAMES = ("gate", "router")
"""Last part of a router's module name, in transformers and in vLLM."""


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's routers by module name, in layer order: modules `gate` or `router` beside `experts`."""
    found = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last in ROUTER_NAMES and hasattr(model.get_submodule(parent), "experts"):
            found[name] = module
    return found


def hf_router_names(model_path: str) -> list[str]:
    """Return the routers' module names in transformers, for the model in `model_path`; loads no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        return list(routers(AutoModelForCausalLM.from_config(config)))
