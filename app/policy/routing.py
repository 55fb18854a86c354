"""The experts that a mixture-of-experts model is routed to, decided by given logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from app.errors import LockstepError


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
