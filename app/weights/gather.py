"""A model's full parameters, one at a time, whether or not DeepSpeed ZeRO-3 has partitioned them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from app.weights.names import hf_name


def named_full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter's Hugging Face name and full tensor; a tied parameter comes once.

    Under ZeRO-3 each parameter is gathered when its turn comes and partitioned again when the next one is asked
    for: use the tensor before going on. The gathering is collective, so every rank must walk through the whole
    iterator, in step with the others.
    """
    for name, parameter in model.named_parameters():
        with _gathered(parameter):
            yield hf_name(name), parameter.detach()


def full_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the full shape of what `named_full_parameters` would yield, without gathering anything."""
    return {
        hf_name(name): torch.Size(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
    }


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


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[object]:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[object] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=None)
    return gathered
