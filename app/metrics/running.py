"""Accumulates named means, spreads and extremes of a training run across micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from app.metrics import formulas
from app.metrics.state import Schema, VectorMetric

Number = Tensor | float


class RunningStatistics(VectorMetric):
    """Global ratios of sums, mean and standard deviation, largest and smallest values; float64, one gather a compute.

    The names are declared at the start, equal on all ranks, so that the ranks' vectors match entry by entry even
    where a rank had nothing to report. A name without data is absent from `compute`.

    >>> metric = RunningStatistics(ratios=["policy/clip_fraction_low"], spreads=["rollout/reward"])
    >>> metric.update(ratios={"policy/clip_fraction_low": (3, 100)}, spreads={"rollout/reward": torch.tensor([0., 1.])})
    >>> metric.compute()
    {'policy/clip_fraction_low': 0.03, 'rollout/reward_mean': 0.5, 'rollout/reward_std': 0.5}
    """

    def __init__(
        self,
        *,
        ratios: Sequence[str] = (),
        spreads: Sequence[str] = (),
        maxima: Sequence[str] = (),
        minima: Sequence[str] = (),
    ) -> None:
        """Declare the names. A spread `x` gives the keys `x_mean` and `x_std` (population)."""
        self.ratios, self.spreads = tuple(ratios), tuple(spreads)
        self.maxima, self.minima = tuple(maxima), tuple(minima)
        sums = [f"{kind} {name}" for name in ratios for kind in ("sum", "count")]
        moments = [f"{kind} {name}" for name in spreads for kind in ("n", "x", "xx")]
        extremes = [*(f"max {name}" for name in maxima), *(f"-min {name}" for name in minima)]
        super().__init__(Schema(sums=(*sums, *moments), maxima=tuple(extremes)))
        self._readers: dict[str, formulas.Reader] = {}
        for name in self.ratios:
            self._readers[name] = formulas.mean(f"sum {name}", f"count {name}")
        for name in self.spreads:
            self._readers[f"{name}_mean"] = formulas.mean(f"x {name}", f"n {name}")
            self._readers[f"{name}_std"] = formulas.std(f"x {name}", f"xx {name}", f"n {name}")
        for name in self.maxima:
            self._readers[name] = formulas.maximum(f"max {name}")
        for name in self.minima:
            self._readers[name] = formulas.minimum(f"-min {name}")

    def update(
        self,
        ratios: Mapping[str, tuple[Number, Number]] | None = None,
        spreads: Mapping[str, Tensor] | None = None,
        maxima: Mapping[str, Number] | None = None,
        minima: Mapping[str, Number] | None = None,
    ) -> None:
        """Add data.

        Args:
            ratios: name -> (sum, count), both scalars: `compute` divides the global sums.
            spreads: name -> values of any shape and number.
            maxima: name -> scalar or tensor of which the largest element counts.
            minima: likewise, the smallest.

        Raises:
            KeyError: if a name was not declared.
        """
        values: dict[str, Any] = {}
        for name, (total, count) in (ratios or {}).items():
            values |= {f"sum {name}": total, f"count {name}": count}
        for name, data in (spreads or {}).items():
            x = data.detach().flatten().double()
            values |= {f"n {name}": float(len(x)), f"x {name}": x.sum(), f"xx {name}": x.dot(x)}
        for name, number in (maxima or {}).items():
            values[f"max {name}"] = _largest(number)
        for name, number in (minima or {}).items():
            values[f"-min {name}"] = _largest(-number)
        self.add(self.schema.pack(values))

    def compute(self) -> dict[str, float]:
        """Return every declared statistic that has data."""
        totals = self.totals()
        found = ((name, reader(totals)) for name, reader in self._readers.items())
        return {name: value for name, value in found if value is not None}


def _largest(number: Number) -> Tensor:
    data = torch.as_tensor(number, dtype=torch.float64).detach().flatten()
    return data.amax() if data.numel() else data.new_tensor(-torch.inf)
