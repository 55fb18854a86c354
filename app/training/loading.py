"""Loading the policy."""

from __future__ import annotations

from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.builtin.models import no_such_model, resolve_model
from app.errors import LockstepError

Dtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]


def load_policy(model_name_or_path: str, dtype: Dtype, attention: Attention) -> PreTrainedModel:
    """Load a causal language model in evaluation mode (no dropout: the engine has none either).

    Raises:
        LockstepError: if there is no such model.
    """
    path = resolve_model(model_name_or_path)
    try:
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    except OSError as error:
        raise LockstepError(no_such_model(model_name_or_path)) from error
    policy.config.use_cache = False
    return policy.eval()
