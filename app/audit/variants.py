"""The trainer's model in another state for one scoring: attention kernel, adapters, dtype, routing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from app.errors import LockstepError, first_line
from app.training.loading import Attention, Dtype
from app.weights.lora import lora_layers


@contextmanager
def attention_kernel(policy: PreTrainedModel, name: Attention | None) -> Iterator[None]:
    """Let `policy` compute attention by another kernel; None: by its own.

    Raises:
        LockstepError: if the model or the machine does not offer it.
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
    """Let the LoRA adapters of `policy` count `factor` times; they and their scales are restored exactly."""
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
    """Copy `policy` with parameters of `dtype`, as if it had been loaded so.

    Parameters that have it already are shared with `policy`, and so are adapters, which are float32 in every policy.
    Buffers keep their precision, unless a float32 copy is asked for: a model loaded in bfloat16 has the frequencies of
    its rotary embedding in float32, and rounding them would turn late positions by whole radians.
    """
    target = getattr(torch, dtype)
    adapters = {
        id(parameter)
        for _, layer in lora_layers(policy)
        for part in (layer.lora_A, layer.lora_B)
        for parameter in part.parameters()
    }
    made: dict[int, Any] = {}  # deepcopy takes these for copies that it has made already: no weight exists twice
    for parameter in policy.parameters():
        shared = parameter.dtype == target or id(parameter) in adapters or not parameter.is_floating_point()
        made[id(parameter)] = (
            parameter if shared else nn.Parameter(parameter.detach().to(target), requires_grad=parameter.requires_grad)
        )
    if target == torch.float32:
        made |= {id(buffer): buffer.float() for buffer in policy.buffers() if buffer.is_floating_point()}
    return copy.deepcopy(policy, made)


@contextmanager
def replaced_routing(policy: nn.Module, router_logits: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the routers of `policy` decide by given logits.

    A router that returns its logits alone returns these. Every other one runs its own code with them in the place of
    its product, whatever it makes of them: scores, groups, biases. They stay float32 until experts are chosen, so that
    no rounding chooses others; what the router returns has the dtypes that it always has.

    Args:
        policy: whose forward passes take exactly the tokens of `router_logits`, unpadded.
        router_logits: [tokens, experts] by the name of the router's module.

    Raises:
        LockstepError: if there is no such module, or none of its products has the shape of the logits.
    """
    modules = dict(policy.named_modules())
    with ExitStack() as hooks:
        for name, logits in router_logits.items():
            if name not in modules:
                raise LockstepError(f"the engine's router {name} is no module of the trainer's {type(policy).__name__}")
            hook = _routed_by(name, logits)
            hooks.callback(modules[name].register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _routed_by(name: str, logits: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(output, Tensor):
            if output.numel() != logits.numel() or output.shape[-1] != logits.shape[-1]:
                raise LockstepError(_does_not_fit(name, logits))
            return logits.to(output).view(output.shape)
        given = _Product(logits)
        with given:
            routed = module.forward(*args, **kwargs)
        if given.replaced != 1:
            raise LockstepError(_does_not_fit(name, logits))
        return tuple(
            new.to(old.dtype) if isinstance(old, Tensor) else old for new, old in zip(routed, output, strict=True)
        )

    return hook


def _does_not_fit(name: str, logits: Tensor) -> str:
    return (
        f"the engine's router logits {tuple(logits.shape)} of {name} cannot take the place of the trainer's: its "
        f"router forms none, or several, of this shape"
    )


class _Product(TorchFunctionMode):
    """Gives `logits` as the result of every linear product of their shape."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.replaced = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not nn.functional.linear or result.shape[-1] != self.logits.shape[-1]:
            return result
        if result.numel() != self.logits.numel():
            return result
        self.replaced += 1
        return self.logits.to(result.device).view(result.shape)
