"""The weights that an engine needs, and the check of those that a sender is about to send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.errors import EngineError
from app.errors import listed


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """The full set of weights that an engine needs, by Hugging Face name. A tied weight is listed once."""

    shapes: Mapping[str, torch.Size]
    """Full shape of each weight, without padding of the vocabulary."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype of each weight in the engine."""
    opaque: tuple[str, ...] = ()
    """Name prefixes of weights whose form inside the engine is unknown (fused experts, quantised layers): their shapes
    are not checked and they have no checksum; only a canary can verify them."""
    lossy: bool = False
    """Whether the engine computes less precisely than the dtypes say (quantised weights or key-value cache)."""

    def is_opaque(self, name: str) -> bool:
        """Return whether the weight's form inside the engine is unknown."""
        return name.startswith(self.opaque)


def check_shapes(layout: WeightLayout, sent: Mapping[str, torch.Size]) -> None:
    """Compare names and shapes with the full expected set, before anything is written.

    Raises:
        EngineError: naming every weight that is missing, unexpected, or of another shape.
    """
    missing = [f"missing {name}" for name in layout.shapes if name not in sent]
    faults = missing + [fault for name, shape in sent.items() if (fault := _fault(layout, name, shape))]
    if faults:
        raise EngineError(
            f"the weights sent do not fit the engine's model: {listed(faults)}. "
            f"The trainer and the engine must load the same model folder."
        )


def checked(layout: WeightLayout, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights one at a time, each checked first; at the end check that none was missing.

    Raises:
        EngineError: at the first weight that is unexpected, sent twice or of another shape; at the end if some are
            missing.
    """
    seen: dict[str, torch.Size] = {}
    for name, tensor in weights:
        fault = f"{name} twice" if name in seen else _fault(layout, name, tensor.shape)
        if fault:
            raise EngineError(f"the weights sent do not fit the engine's model: {fault}")
        seen[name] = tensor.shape
        yield name, tensor
    check_shapes(layout, seen)


def _fault(layout: WeightLayout, name: str, shape: torch.Size) -> str | None:
    if layout.is_opaque(name):
        return None
    if name not in layout.shapes:
        return f"unexpected {name}"
    if shape != layout.shapes[name]:
        return f"{name} of shape {list(shape)}, the engine has {list(layout.shapes[name])}"
    return None
