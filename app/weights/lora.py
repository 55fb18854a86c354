"""The weights of a model whose linear layers may carry LoRA adapters: what each weight is once they are added.

LoRA (arXiv:2106.09685): the layer's weight is W + scale B A, scale = lora_alpha / r (or lora_alpha / √r,
arXiv:2312.03732). peft's layers are known here by their attributes, so that this room needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.weights.names import hf_name

TILE_BYTES = 1 << 22
"""Bytes of float32 merged at a time: what a merge needs beside its result."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight under its Hugging Face name, with the adapter it carries, if any."""

    name: str
    """Its name in the Hugging Face model."""
    base: nn.Parameter
    """The model's own parameter, of shape [out, in] if it carries an adapter."""
    adapter: tuple[nn.Parameter, nn.Parameter] | None = None
    """LoRA's A [r, in] and B [out, r]; None: it carries no adapter."""
    scale: float = 1.0
    """What the product B A is multiplied by before it is added to the base."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Every parameter that the full weight is made of."""
        return (self.base, *(self.adapter or ()))

    def full(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight as the layer uses it; the parameters must be whole (see `named_full_parameters`).

        Without an adapter that is a view of the parameter, whatever `dtype` says. With one it is a new tensor of
        `dtype` (None: the parameter's): summed in float32, rounded once; the parameters are only read.
        """
        if self.adapter is None:
            return self.base.detach()
        base, (a, b) = self.base.detach(), (parameter.detach() for parameter in self.adapter)
        return _merged(base, a.float(), b, self.scale, dtype or base.dtype)


def _merged(base: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    merged = torch.empty(base.shape, dtype=dtype, device=base.device)
    rows = max(1, TILE_BYTES // (4 * base.shape[1]))
    with torch.autocast(base.device.type, enabled=False):  # or the product would be bfloat16 in mixed precision
        for start in range(0, len(base), rows):
            tile = slice(start, start + rows)
            merged[tile] = torch.addmm(base[tile].float(), b[tile].float(), a, alpha=scale)
    return merged


def weights(model: nn.Module) -> list[Weight]:
    """Return the model's weights in the order of its parameters; a tied one comes once, adapters are no weights.

    Raises:
        ValueError: if a layer's adapters were added to its weights in place: they would count twice.
    """
    adapted = {id(layer.base_layer.weight): layer for _, layer in lora_layers(model)}
    adapters = {id(p) for layer in adapted.values() for p in _adapter(layer)}
    found = []
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        layer = adapted.get(id(parameter))
        if layer is None:
            found.append(Weight(name=hf_name(name), base=parameter))
        else:
            (scale,) = layer.scaling.values()
            found.append(Weight(name=hf_name(name), base=parameter, adapter=_adapter(layer), scale=scale))
    return found


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each layer that carries an adapter.

    Raises:
        ValueError: if the adapter was added to the weight in place.
    """
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            if module.merged:
                raise ValueError(f"{name}: its adapter was merged into the weight in place and would count twice")
            yield name, module


def _adapter(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of the layer's one adapter."""
    (a,), (b,) = layer.lora_A.values(), layer.lora_B.values()
    return a.weight, b.weight
