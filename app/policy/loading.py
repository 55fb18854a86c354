"""Loading the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from app.builtin.models import no_such_model, resolve_model
from app.data.tokenizer import load_tokenizer
from app.errors import LockstepError

Dtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
MIXED_PRECISION: dict[str, Dtype] = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
"""What is computed in under the Trainer's mixed precision, whatever the parameters' dtype."""


def load_policy(
    model_name_or_path: str, dtype: Dtype, attention: Attention, key: str = "model.model_name_or_path"
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode (no dropout: the engine has none either).

    Args:
        model_name_or_path: which.
        dtype: of its parameters.
        attention: its attention kernel.
        key: the setting that named the model, for messages.

    Raises:
        LockstepError: if there is no such model.
    """
    path = resolve_model(model_name_or_path)
    try:
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    except OSError as error:
        raise LockstepError(no_such_model(model_name_or_path, key)) from error
    policy.config.use_cache = False
    return policy.eval()


def check_same_model(module: nn.Module, saved: Mapping[str, Tensor] | None) -> None:
    """Compare the names and shapes of a checkpoint's weights with those of `module`, before any is loaded.

    Args:
        module: that is to take them.
        saved: weights by name; None: the strategy keeps them elsewhere and checks them itself.

    Raises:
        LockstepError: naming the first weight that does not fit.
    """
    if saved is None:
        return
    own = module.state_dict()
    for name in (*own, *saved):
        if name not in saved or name not in own or own[name].shape != saved[name].shape:
            raise LockstepError(
                f"--ckpt_path: the checkpoint is of another model or other model.lora settings: {name} does not fit"
            )


def load_teacher(
    teacher_name_or_path: str, student_name_or_path: str, dtype: Dtype, attention: Attention
) -> PreTrainedModel:
    """Load a model that scores another one's tokens. Padded embeddings may differ, tokenizers may not.

    Raises:
        LockstepError: if there is no such model, or its tokenizer gives some token another id.
    """
    key = "model.teacher_model_name_or_path"
    teacher = load_policy(teacher_name_or_path, dtype, attention, key)
    vocabularies = (load_tokenizer(teacher_name_or_path, key), load_tokenizer(student_name_or_path))
    if vocabularies[0].get_vocab() != vocabularies[1].get_vocab():
        raise LockstepError(
            f"{key}={teacher_name_or_path} has another vocabulary than {student_name_or_path}: a teacher scores the "
            f"policy's tokens and must share its tokenizer"
        )
    return teacher


def recompute_layers(policy: PreTrainedModel) -> None:
    """Recompute the activations of each layer in the backward pass instead of keeping them.

    transformers does so only in layers that are in training mode; their submodules stay in evaluation mode, so that
    no dropout parts the trainer from the engine.

    Raises:
        LockstepError: if the architecture does not offer it.
    """
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise LockstepError(f"model.gradient_checkpointing: {type(policy).__name__} does not offer it; set it to false")
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
