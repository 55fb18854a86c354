"""Parameter names: from the trainer's module to the Hugging Face name that an engine expects.

Llama, Mistral, Qwen2, Qwen3 and SmolLM carry their Hugging Face names in the trainer already; only what wrappers
add must go.
"""

from __future__ import annotations

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
