"""The gradient of an optimiser step: its norm before clipping, and how to leave the step out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from app.world import World


class Gradients(Protocol):
    """The gradients of all micro-batches and ranks, between the last backward pass and the step."""

    def complete(self) -> bool:
        """Whether all micro-batches of the step are in."""

    def norm(self) -> Tensor:
        """Return the norm over all parameters, before clipping; infinite or NaN if any entry is. Collective."""

    def discard(self) -> None:
        """Make the coming optimiser step leave weights and optimiser state as they are; call `norm` first."""


class PlainGradients:
    """Gradients that lie whole in `Parameter.grad`, as without any strategy and under DDP."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def complete(self) -> bool:
        """Always: Lightning announces only steps whose gradients are complete."""
        return True

    def norm(self) -> Tensor:
        """See Gradients."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def discard(self) -> None:
        """Take the gradients away: optimisers skip parameters without one.

        A gradient of zeros would still move them, by momentum and decay.
        """
        for parameter in self._parameters:
            parameter.grad = None


class ZeroGradients:
    """Gradients that DeepSpeed's ZeRO optimisers keep, partitioned or in buffers of their own.

    DeepSpeed leaves out a step whose gradient norm is not a number, and drops its gradients: that is how a step is
    discarded here. The method by which it gets the norm is replaced, so that the norm is computed once.
    """

    def __init__(self, engine: Any) -> None:
        """Attach to a DeepSpeedEngine of ZeRO stage 1, 2 or 3."""
        self._engine = engine
        self._optimizer = engine.optimizer
        name = "_get_norm_groups" if hasattr(engine.optimizer, "_get_norm_groups") else "scaled_global_norm"
        self._partial = name == "_get_norm_groups"  # stage 3 gives the norms of groups of parameters
        self._compute = getattr(engine.optimizer, name)
        self._found: Any = None
        setattr(engine.optimizer, name, self._take)

    def complete(self) -> bool:
        """Whether this micro-batch is the last of its step: Lightning announces every one of them."""
        return bool(self._engine.is_gradient_accumulation_boundary())

    def norm(self) -> Tensor:
        """See Gradients. fp16: loss scaling undone."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        self._found = self._compute()
        norm = combine_grad_norm_groups(self._found) if self._partial else self._found
        return norm / self._optimizer.loss_scale

    def discard(self) -> None:
        """See Gradients."""
        nan = torch.tensor(torch.nan, device=self._engine.device)
        self._found = [nan] if self._partial else nan

    def _take(self) -> Any:
        """What DeepSpeed's step asks for."""
        found, self._found = self._found, None
        return found


def gradients_of(strategy: Any, parameters: Iterable[nn.Parameter]) -> Gradients:
    """Return the gradients of a run, where its strategy keeps them."""
    if isinstance(strategy, DeepSpeedStrategy):
        return ZeroGradients(strategy.deepspeed_engine)
    return PlainGradients(parameters)


def undone_divisions(trainer: Any, world: World) -> int:
    """Return what a loss must be multiplied by that is normalised over the whole optimiser step already.

    Lightning divides by accumulate_grad_batches, DeepSpeed does so once more in its own backward, and the strategies
    average gradients over ranks.
    """
    accumulate: int = trainer.accumulate_grad_batches
    if trainer.strategy.handles_gradient_accumulation:
        accumulate *= accumulate
    return accumulate * world.size
