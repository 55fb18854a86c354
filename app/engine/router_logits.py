"""The routers of mixture-of-experts models, and their logits while an engine decodes forced tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from app.engine.errors import EngineError
from app.engine.forced_decoding import ForcedRow


class Place(NamedTuple):
    """The place of one request's tokens in a forward pass."""

    row: int
    """Index of the request in the call, from 0."""
    start: int
    """Position of its first token in this pass, counted from the beginning of its prompt."""
    where: slice
    """Slice of its tokens among all that the pass computes."""


class RouterLogits:
    """Records the logits of every router within its `with` block, token by token.

    Positions that are computed again (after a preemption) are overwritten.

    Args:
        modules: the routers by the name under which their logits are reported.
        rows: the completions that are decoded.
        places: called during a forward pass; returns the place of each request's tokens in it.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], rows: Sequence[ForcedRow], places: Callable[[], Sequence[Place]]
    ) -> None:
        self._modules = modules
        self._lengths = {forced.row: forced.computed for forced in rows}
        self._places = places
        self._logits: dict[tuple[int, str], Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> RouterLogits:
        """Start recording."""
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: Any) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def of(self, row: int) -> dict[str, Tensor]:
        """Return [tokens, experts] float32 of each router for a row.

        Raises:
            EngineError: if a router did not run for each token, because a captured graph or another computation
                replaced it.
        """
        logits = {name: self._logits.get((row, name)) for name in self._modules}
        for name, values in logits.items():
            if values is None or bool(values.isnan().any()):
                raise EngineError(
                    f"the router {name} did not compute every token where it can be observed: start the engine with "
                    f"enforce_eager: true"
                )
        return {name: values for name, values in logits.items() if values is not None}

    def _hook(self, name: str) -> Callable[..., None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            values = values.detach().flatten(0, -2)
            for row, start, where in self._places():
                length = self._lengths[row]
                # A finished row may be computed further beside others; those tokens do not belong to it.
                part = values[where][: max(0, length - start)].float().cpu()
                own = self._logits.setdefault((row, name), torch.full((length, values.shape[-1]), torch.nan))
                own[start : start + len(part)] = part

        return record
