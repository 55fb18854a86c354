"""One float64 vector of sums, counts and extremes: the state that every metric of this package keeps and merges.

Adding the sums of parts and taking the larger of their maxima gives exactly the vector of the whole, so a value
read from the merged vector does not depend on how rows were split over micro-batches, ranks or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed
from torchmetrics import Metric


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A vector read back to the host, by name."""

    values: Mapping[str, float]
    """Sums and maxima. A maximum over nothing is -inf."""
    counts: Mapping[str, Tensor]
    """Histograms: [bins] float64 on the CPU, by name."""

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Which entry of a vector means what: [sums | histogram counts | maxima]."""

    sums: tuple[str, ...]
    """Names of the entries that add."""
    maxima: tuple[str, ...] = ()
    """Names of the entries of which the larger is kept. A minimum is kept as the maximum of -x."""
    histograms: Mapping[str, int] = field(default_factory=dict)
    """Bins of each histogram; counts add. float64 holds them exactly up to 2**53."""

    @cached_property
    def _places(self) -> dict[str, int]:
        """Name -> its entry of the vector."""
        maxima = {name: self.added + i for i, name in enumerate(self.maxima)}
        return {name: i for i, name in enumerate(self.sums)} | maxima

    @property
    def added(self) -> int:
        """How many leading entries of the vector add."""
        return len(self.sums) + sum(self.histograms.values())

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return the vector of no data: sums 0, maxima -inf."""
        vector = torch.zeros(self.added + len(self.maxima), dtype=torch.float64, device=device)
        vector[self.added :] = -torch.inf
        return vector

    def pack(self, values: Mapping[str, Tensor | float], counts: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the vector of `values` (scalars by name) and `counts` ([bins] by name); absent ones are as of no data.

        Raises:
            KeyError: if a name is neither a sum nor a maximum of this schema.
        """
        if unknown := values.keys() - self._places.keys():
            raise KeyError(f"unknown names {sorted(unknown)}; known: {sorted((*self.sums, *self.maxima))}")
        device = next((value.device for value in values.values() if isinstance(value, Tensor)), None)
        vector = self.empty(device)
        if values:
            index = torch.tensor([self._places[name] for name in values], device=device)
            vector[index] = torch.stack([torch.as_tensor(value, device=device) for value in values.values()]).double()
        for name, part in self._histograms(vector).items():
            if counts is not None and name in counts:
                part.copy_(counts[name])
        return vector

    def add_up(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the values of all `parts` (scalars by name, one set of names), for `pack`: added, or the largest."""
        if not parts:
            return {}
        stacked = torch.stack([torch.stack(list(part.values())) for part in parts]).double()
        added, largest = stacked.sum(0), stacked.amax(0)
        return {name: (largest if name in self.maxima else added)[i] for i, name in enumerate(parts[0])}

    def merge(self, stacked: Tensor) -> Tensor:
        """Merge vectors [N, size] into the one vector of all their data."""
        return torch.cat([stacked[:, : self.added].sum(0), stacked[:, self.added :].amax(0)])

    def read(self, vector: Tensor) -> Totals:
        """Copy a vector to the host (one transfer)."""
        host = vector.detach().cpu()
        scalars = torch.cat([host[: len(self.sums)], host[self.added :]]).tolist()
        names = (*self.sums, *self.maxima)
        return Totals(values=dict(zip(names, scalars, strict=True)), counts=self._histograms(host))

    def _histograms(self, vector: Tensor) -> dict[str, Tensor]:
        """The views of a vector that are its histograms."""
        parts = vector[len(self.sums) : self.added].split(list(self.histograms.values()))
        return dict(zip(self.histograms, parts, strict=True)) if self.histograms else {}


class VectorMetric(Metric):
    """A torchmetrics Metric whose whole state is one `Schema` vector: one gather per `compute`.

    Several of them share one gather inside `fused_sync`.

    The state stays float64 whatever the module around it is cast to, and is part of `state_dict`, so a window of
    accumulation may cross a checkpoint. With several ranks the local `state_dict` holds this rank's part only: where
    one rank's state is what gets saved, take it inside `with metric.sync_context():` (all ranks enter) and load it
    on one rank.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = None
    vector: Tensor

    def __init__(self, schema: Schema, **kwargs: Any) -> None:
        """Keep `schema`; `kwargs` go to torchmetrics.Metric."""
        super().__init__(**kwargs)
        self.schema = schema
        self.add_state("vector", default=schema.empty(), dist_reduce_fx=schema.merge, persistent=True)

    def add(self, vector: Tensor) -> None:
        """Merge one more vector into the state.

        Raises:
            RuntimeError: while the state is that of all ranks: what is added would be lost when it is put back.
        """
        if self._is_synced:
            raise RuntimeError(f"{type(self).__name__}: the state is synced; update it outside of the sync context.")
        self.vector = self.schema.merge(torch.stack([self.vector, vector.to(self.vector.device)]))

    def totals(self) -> Totals:
        """Read the state."""
        return self.schema.read(self.vector)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Any = "") -> VectorMetric:
        # `module.to(torch.bfloat16)` reaches every metric inside the module and would round the sums: only the
        # device of what `fn` does is taken over.
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(fn(torch.empty(0, dtype=torch.float64, device=tensor.device)).device)

        super()._apply(move, exclude_state)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "vector")
        if saved is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        if saved.shape != self.vector.shape:
            raise ValueError(
                f"{prefix}vector: the saved state has {saved.numel()} entries, this {type(self).__name__} has "
                f"{self.vector.numel()}; it was written with other settings or another version: drop it and start "
                f"the window anew."
            )
        device = self.vector.device
        super()._load_from_state_dict(state_dict, prefix, *args)
        # torchmetrics takes the saved tensor where it lies and keeps the value cached before the load.
        self.vector = self.vector.to(device=device, dtype=torch.float64)
        self._computed = None
        self._update_count = max(self._update_count, 1)


@contextmanager
def fused_sync(metrics: Iterable[VectorMetric]) -> Iterator[None]:
    """Inside, every metric holds the merged state of all ranks, got by one `all_gather`; afterwards its own again.

    All ranks enter together, with the same metrics in the same order: the vectors then have equal sizes, and the
    sizes need not be exchanged first. Metrics that are synced already keep their state, so contexts nest; updates
    are refused inside. Does nothing without an initialised process group.

    >>> with fused_sync([*mismatch.values(), policy]):  # doctest: +SKIP
    ...     values = {**mismatch.compute(), **policy.compute()}
    """
    own = [metric for metric in metrics if not metric._is_synced]
    if not own or not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    local = [metric.vector for metric in own]
    joined = torch.cat(local)
    gathered = [torch.empty_like(joined) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, joined)
    parts = torch.stack(gathered).split([len(vector) for vector in local], dim=1)
    flags = [(metric._to_sync, metric._should_unsync) for metric in own]
    for metric, part in zip(own, parts, strict=True):
        metric.vector = metric.schema.merge(part)
        # torchmetrics' own sync would gather once more, and restore a cache that it did not fill
        metric._is_synced, metric._to_sync, metric._should_unsync = True, False, False
        metric._computed = None
    try:
        yield
    finally:
        for metric, vector, (to_sync, should_unsync) in zip(own, local, flags, strict=True):
            metric.vector = vector
            metric._is_synced, metric._to_sync, metric._should_unsync = False, to_sync, should_unsync
