"""The routers of mixture-of-experts models, and their logits while an engine decodes forced tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from app.engine.errors import EngineError
from app.engine.forced_decoding import ForcedRow

ROUTER_NAMES = ("gate", "router")
"""Last part of a router's name, in transformers as in vLLM."""


class Place(NamedTuple):
    """Where the tokens of one request are in a forward pass."""

    row: int
    """The request's index in the call."""
    start: int
    """Position of its first token there, from the beginning of its prompt."""
    where: slice
    """Its tokens among all that are computed."""


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model by module name, in the order of the layers: `gate` or `router` beside `experts`."""
    found = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last in ROUTER_NAMES and hasattr(model.get_submodule(parent), "experts"):
            found[name] = module
    return found


def hf_router_names(model_path: str) -> list[str]:
    """Return the names that transformers gives to the routers of the model in `model_path`; nothing is loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        return list(routers(AutoModelForCausalLM.from_config(config)))


class RouterLogits:
    """Records within its `with` block the logits of every router, token by token.

    Positions that are computed again (after a preemption) are written again.

    Args:
        modules: the routers, by the name under which their logits are asked for.
        rows: what is decoded.
        places: called while a forward pass runs: where the tokens of each request are in it.
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
        """Begin to record."""
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: Any) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def of(self, row: int) -> dict[str, Tensor]:
        """Return [tokens, experts] float32 of each router for a row.

        Raises:
            EngineError: if a router did not run for each token: a captured graph or another computation took its
                place.
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
                # A row that is finished may be computed on beside others; those tokens are none of its own.
                part = values[where][: max(0, length - start)].float().cpu()
                own = self._logits.setdefault((row, name), torch.full((length, values.shape[-1]), torch.nan))
                own[start : start + len(part)] = part

        return record
