"""A model's full weights, one at a time, whether or not DeepSpeed ZeRO-3 has partitioned them or LoRA adapts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from app.weights.lora import Weight, weights
from app.weights.names import hf_name

GROUP_BYTES = 64 << 20
"""Most bytes gathered together, unless one weight alone is larger: enough that few collectives are needed."""


def named_full_parameters(
    model: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None, group_bytes: int = GROUP_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight's Hugging Face name and full tensor; a tied one comes once.

    Use each tensor before taking the next: it is emptied then. Under ZeRO-3 consecutive weights are gathered in
    groups of at most `group_bytes`, and of at most what the model's largest weight takes, which may be gathered alone.
    The gathering is collective: every rank must consume the whole iterator, in step with the others.

    A weight with a LoRA adapter comes merged, as a new tensor, computed in float32 and rounded once to its dtype in
    `dtypes` (absent: the parameter's own). Base and adapter are only read: a merge in place that is undone after the
    sync would let the base drift. Merged weights need no support for adapters in the engine and have checksums.
    """
    for group in _groups(weights(model), group_bytes):
        with _gathered([parameter for weight in group for parameter in weight.parameters]):
            for weight in group:
                tensor = weight.full((dtypes or {}).get(weight.name))
                yield weight.name, tensor
                # Else whoever still names it would keep its memory while the next group is gathered.
                tensor.data = tensor.new_empty(0)


def full_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the full shape of what `named_full_parameters` would yield, without gathering anything."""
    return {weight.name: torch.Size(getattr(weight.base, "ds_shape", weight.base.shape)) for weight in weights(model)}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return, for each further name of a tied parameter, the name under which it is yielded."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = hf_name(name)
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def _groups(found: Sequence[Weight], most: int) -> Iterator[list[Weight]]:
    """Cut into runs of at most `most` bytes and at most the largest weight's."""
    sizes = [sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in weight.parameters) for weight in found]
    most = min(most, max(sizes))
    group: list[Weight] = []
    held = 0
    for weight, size in zip(found, sizes, strict=True):
        if group and held + size > most:
            yield group
            group, held = [], 0
        group.append(weight)
        held += size
    yield group


def _gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)
    return gathered
