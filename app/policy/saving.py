"""A policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from app.data.tokenizer import load_tokenizer
from app.weights.gather import named_full_parameters
from app.weights.lora import lora_layers


def save_policy(policy: PreTrainedModel, model_name_or_path: str, folder: Path) -> None:
    """Write a policy, adapters merged, and the tokenizer of `model_name_or_path` to `folder`; the policy stays."""
    adapted = any(lora_layers(policy))
    merged = {name: tensor.clone() for name, tensor in named_full_parameters(policy)} if adapted else None
    use_cache, policy.config.use_cache = policy.config.use_cache, True  # training switched it off
    policy.save_pretrained(folder, state_dict=merged)
    policy.config.use_cache = use_cache
    load_tokenizer(model_name_or_path).save_pretrained(folder)
