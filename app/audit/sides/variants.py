"""The trainer's model in another state for one scoring: attention kernel, adapters, dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from app.errors import LockstepError, first_line
from app.policy.loading import Attention, Dtype
from app.weights.lora import lora_layers


@contextmanager
def attention_kernel(policy: PreTrainedModel, name: Attention | None) -> Iterator[None]:
    """Switch `policy` to another attention kernel within the block; None: no change.

    Raises:
        LockstepError: if the model or the machine does not support it.
    """
    own = policy.config._attn_implementation
    if name is None or name == own:
        yield
        return
    try:
        policy.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise LockstepError(f"attention {name} cannot be tried: {first_line(error)}") from error
    try:
        if policy.config._attn_implementation != name:
            raise LockstepError(f"attention {name} cannot be tried: {type(policy).__name__} keeps to its own, {own}")
        yield
    finally:
        policy.set_attn_implementation(own)


@contextmanager
def scaled_adapters(policy: nn.Module, factor: float) -> Iterator[None]:
    """Scale the LoRA adapters of `policy` by `factor` within the block; their scales are restored exactly."""
    layers = [layer for _, layer in lora_layers(policy)] if factor != 1 else []
    own = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update({name: scale * factor for name, scale in layer.scaling.items()})
    try:
        yield
    finally:
        for layer, scaling in zip(layers, own, strict=True):
            layer.scaling.update(scaling)


def copy_in(policy: PreTrainedModel, dtype: Dtype) -> PreTrainedModel:
    """Return a copy of `policy` with parameters of `dtype`, as if it had been loaded in it.

    Parameters that have the dtype already are shared with `policy`, and so are adapters, which are float32 in every
    policy. Buffers keep their precision, except in a float32 copy: a model loaded in bfloat16 has its rotary
    frequencies in float32, and rounding them would turn late positions by whole radians.
    """
    target = getattr(torch, dtype)
    adapters = {
        id(parameter)
        for _, layer in lora_layers(policy)
        for part in (layer.lora_A, layer.lora_B)
        for parameter in part.parameters()
    }
    made: dict[int, Any] = {}  # deepcopy treats these as copies it has made already, so no weight exists twice
    for parameter in policy.parameters():
        shared = parameter.dtype == target or id(parameter) in adapters or not parameter.is_floating_point()
        made[id(parameter)] = (
            parameter if shared else nn.Parameter(parameter.detach().to(target), requires_grad=parameter.requires_grad)
        )
    if target == torch.float32:
        made |= {id(buffer): buffer.float() for buffer in policy.buffers() if buffer.is_floating_point()}
    return copy.deepcopy(policy, made)
