"""The mass of a sampling support under the scoring function of training, which covers the whole vocabulary."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from app.audit.sides.scores import TOKENS_AT_A_TIME
from app.errors import LockstepError
from app.maths.sampling import sampled_distribution
from app.policy.scoring import output_head
from app.types import SamplingConfig


class SupportMass:
    """Records, within its `with` block, each token's support mass from the hidden states that reach the model's head.

    log p(token | support) = log p(token) - log p(support), so the scoring function itself stays as it is.

    Args:
        model: its head is called with [n, H] hidden states of some of the tokens at a time, in order.
        ids: [N] int64, the tokens that are scored.
        sampling: temperature, and the filters that define the support.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, sampling: SamplingConfig) -> None:
        self._module: nn.Module = model.get_output_embeddings()
        self._head = output_head(model)
        self._ids = ids
        self._filtered, self._all = sampling, dataclasses.replace(sampling, top_k=0, top_p=1.0)
        self._seen = 0
        self._log_mass: list[Tensor] = []
        self._watching = True
        self._hook: RemovableHandle

    def __enter__(self) -> SupportMass:
        """Start recording."""
        self._hook = self._module.register_forward_hook(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop recording."""
        self._hook.remove()

    def log_mass(self) -> Tensor:
        """Return [N] float64, nats; infinite for a token outside its support, which then has the probability 0.

        Raises:
            LockstepError: if the head was not called with every token once.
        """
        if self._seen != len(self._ids):
            raise LockstepError(
                f"the trainer's head was called with {self._seen} hidden states to score {len(self._ids)} tokens: its "
                f"sampling support cannot be followed"
            )
        return torch.cat(self._log_mass)

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not self._watching:
            return
        hidden = args[0].flatten(0, -2)
        start, self._seen = self._seen, self._seen + len(hidden)
        if self._seen > len(self._ids):
            return  # `log_mass` raises
        self._watching = False  # computing the scaled and capped logits below calls the head once more
        for states, ids in zip(
            hidden.split(TOKENS_AT_A_TIME), self._ids[start : self._seen].split(TOKENS_AT_A_TIME), strict=True
        ):
            logits = self._head(states)
            own = [
                sampled_distribution(logits, sampling).gather(-1, ids[:, None]).squeeze(-1).double()
                for sampling in (self._all, self._filtered)
            ]
            self._log_mass.append(own[0] - own[1])
        self._watching = True
