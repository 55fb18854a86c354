"""Engines that break the weight sync on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from app.rollout.vllm_engine import VLLMEngine

SKIPPED = "model.layers.1.self_attn.k_proj.weight"


class SkippingEngine(VLLMEngine):
    """Keeps one parameter as it was first loaded, from the second sync on."""

    _first: Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load all weights but one."""
        super().load_weights(self._stale(weights), policy_version)

    def _stale(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name == SKIPPED:
                self._first = tensor.clone() if self._first is None else self._first
                tensor = self._first
            yield name, tensor
