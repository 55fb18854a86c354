"""The module of a model that produces the first value that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True, kw_only=True)
class ModuleFault:
    """The first module, in the order they finish, whose output is not finite."""

    name: str
    """Name of the module, as in `named_modules`."""
    input_finite: bool
    """Whether its input was finite; False: the value arose before this module, between two modules."""
    bad_parameters: tuple[str, ...]
    """Names of its own parameters that are not finite."""
    column: int | None
    """First sequence position at which its output is not finite; None: the output has no positions. Later modules
    do not show it: a masked key has attention 0, and 0 x NaN spoils the positions before it too."""

    def __str__(self) -> str:
        """Return the fault in words, for the report."""
        if self.bad_parameters:
            return f"{self.name} (its {', '.join(self.bad_parameters)} is not finite)"
        return self.name if self.input_finite else f"just before {self.name}"


@dataclass(kw_only=True)
class Passage:
    """What `probe` observed in a forward pass."""

    fault: ModuleFault | None = None
    """First module whose output was not finite; None: all outputs were."""
    largest: dict[str, float] = field(default_factory=dict)
    """Largest |output| of the embedding, of each layer, and of the head (the logits), in this order."""


@contextmanager
def probe(model: nn.Module, embedding: nn.Module, head: nn.Module) -> Iterator[Passage]:
    """Observe every module's output while the model runs. The hooks copy to the host: for diagnosis, not for training.

    Args:
        model: a transformers model.
        embedding: input embedding of the model.
        head: output head of the model.
    """
    found = Passage()
    handles = []

    def hook(name: str, watched: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if watched:
            largest = max((float(value.detach().abs().max()) for value in _floats(output)), default=0.0)
            before = found.largest.get(name, 0.0)
            found.largest[name] = largest if not largest <= before else before  # NaN stays
        if found.fault is None and not _finite(output):
            given = {key: value for key, value in kwargs.items() if key != "attention_mask"}  # may hold -inf
            own = module.named_parameters(recurse=False)
            found.fault = ModuleFault(
                name=name,
                input_finite=_finite(args) and _finite(given),
                bad_parameters=tuple(key for key, value in own if not value.isfinite().all()),
                column=_first_bad_column(output),
            )

    for name, module in model.named_modules():
        watched = module in (embedding, head) or isinstance(module, GradientCheckpointingLayer)

        def bound(*seen: Any, name: str = name, watched: bool = watched) -> None:
            hook(name, watched, *seen)

        if name:
            handles.append(module.register_forward_hook(bound, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _floats(value: Any) -> Iterator[Tensor]:
    """Every floating-point tensor with values inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _floats(part)


def _first_bad_column(output: Any) -> int | None:
    """The least S index in outputs of shape [B, S, ...] where a value is not finite."""
    sequences = [tensor for tensor in _floats(output) if tensor.dim() >= 3]
    columns = [(~tensor.isfinite()).flatten(2).any(-1).any(0).nonzero().flatten().tolist() for tensor in sequences]
    return min((found[0] for found in columns if found), default=None)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _floats(value))
