"""Send the trainer's weights to the engine and prove that they arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from app.engine.errors import EngineFailure
from app.engine.protocol import Engine
from app.engine.weight_layout import WeightLayout, check_shapes
from app.sync.canary import (
    CanaryReport,
    Scorer,
    compare_logprobs,
    mean_tolerance,
    scored_rows,
)
from app.sync.peak_memory import peak_bytes
from app.sync.verify import SyncError, compare
from app.types import Request, SamplingConfig
from app.weights.checksum import checksum, with_tied
from app.weights.gather import full_shapes, named_full_parameters
from app.world import World

Verify = Literal["off", "checksum", "logprobs"]
Result = TypeVar("Result")

CANARY_SAMPLING = SamplingConfig(temperature=1.0, max_tokens=16)
"""How the canary samples; the scorer must score at the same temperature."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one synchronisation did; times and memory are the largest of all ranks."""

    seconds: float
    """Seconds to gather, check and write the weights; the trainer's checksums included."""
    verify_seconds: float
    """Seconds that the engine's checksums and the canary took."""
    bytes: int
    """Bytes written into each rank's engine, in its own dtypes."""
    peak_growth_bytes: int | None
    """By how much a process's highest memory use ever rose: 0 where an earlier moment needed more. None: unknown."""
    canary: CanaryReport | None
    """What the canary found; None: it did not run this time."""

    @property
    def metrics(self) -> dict[str, float]:
        """What the dashboard shows, by key; `app.dashboard.keys` has the units."""
        values = {
            "weight_sync/seconds": self.seconds,
            "weight_sync/verify_seconds": self.verify_seconds,
            "weight_sync/gigabytes_per_second": self.bytes / self.seconds / 1e9,
        }
        if self.peak_growth_bytes is not None:
            values["weight_sync/peak_memory_growth_megabytes"] = self.peak_growth_bytes / 1e6
        if self.canary is not None:
            values["weight_sync/canary_abs_diff_mean"] = self.canary.mean_abs_diff
        return values


class WeightSynchroniser:
    """Sends a model's weights to an engine and verifies them, with every rank failing together.

    Args:
        engine: this rank's engine.
        world: the ranks, each of which has an engine.
        verify: "off"; "checksum": every weight's bits after every sync, and a canary at the first and every
            `canary_every` syncs; "logprobs": both after every sync. Weights that have no checksum
            (`WeightLayout.opaque`) need the canary every time. Without a scorer "checksum" does without the canary,
            if it can.
        canary_every: syncs between two canaries under "checksum".
        canary_tolerance: largest mean |delta| in nats; None takes it from the dtypes.
        compute_dtype: dtype the trainer computes in, bfloat16 under bf16-mixed; None takes the parameters'.
        requests: what the canary samples (`canary_requests`); needed wherever `sync` is given a scorer.

    Raises:
        ValueError: if `canary_every` is below 1.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        *,
        verify: Verify = "checksum",
        canary_every: int = 50,
        canary_tolerance: float | None = None,
        compute_dtype: torch.dtype | None = None,
        requests: Sequence[Request] = (),
    ) -> None:
        if canary_every < 1:
            raise ValueError(f"canary_every={canary_every}: expected at least 1")
        self.engine = engine
        self.world = world
        self.verify = verify
        self.canary_every = canary_every
        self.canary_tolerance = canary_tolerance
        self.compute_dtype = compute_dtype
        self.requests = requests
        self.syncs = 0
        """Syncs done."""

    def sync(self, model: nn.Module, policy_version: int, score: Scorer | None = None) -> SyncReport:
        """Replace the engine's weights by `model`'s; call it on every rank at the same point.

        `score` gives the trainer's log-probabilities at temperature 1 (`CANARY_SAMPLING`); every rank calls it once
        per canary, so it may gather weights.

        Raises:
            EngineError: names or shapes do not fit (nothing is written then).
            EngineFailure: on every rank, if the engine of one failed and may be started again.
            SyncError: the weights in the engine are not the trainer's; or another rank failed (its message); or
                verification needs `score`, or requests for the canary, and there is none.
        """
        device = next(model.parameters()).device
        start, peak = time.perf_counter(), peak_bytes(device)
        layout = self.engine.weight_layout()
        needs_canary = self.verify == "logprobs" or (self.verify != "off" and bool(layout.opaque))
        if needs_canary and score is None:
            raise SyncError(f"verify={self.verify!r} needs a scorer for {list(layout.opaque) or 'the canary'}")
        canary_due = needs_canary or (self.verify == "checksum" and self.syncs % self.canary_every == 0)
        if canary_due and score is not None and not self.requests:
            raise SyncError(f"verify={self.verify!r} needs requests for the canary")
        self._together(lambda: check_shapes(layout, full_shapes(model)))
        expected: dict[str, int] = {}
        self._together(lambda: self._load(model, layout, policy_version, expected))
        loaded = time.perf_counter()
        if self.verify != "off":
            self._together(lambda: self._compare(model, expected))
        canary = self._run_canary(model, layout, score) if canary_due and score is not None else None
        self.syncs += 1
        seconds, verify_seconds, growth = self._largest(
            loaded - start, time.perf_counter() - loaded, (peak_bytes(device) or 0) - (peak or 0)
        )
        return SyncReport(
            seconds=seconds,
            verify_seconds=verify_seconds,
            bytes=sum(shape.numel() * layout.dtypes[name].itemsize for name, shape in layout.shapes.items()),
            peak_growth_bytes=None if peak is None else int(growth),
            canary=canary,
        )

    def _load(self, model: nn.Module, layout: WeightLayout, policy_version: int, expected: dict[str, int]) -> None:
        weights = self._recorded(model, layout, expected)
        try:
            self.engine.load_weights(weights, policy_version)
        finally:
            # After a failure the other ranks go on with the gathering, which is collective: go on with them.
            for _ in weights:
                pass

    def _compare(self, model: nn.Module, expected: dict[str, int]) -> None:
        actual = self.engine.checksums()
        compare(with_tied(expected, model, listed=actual), actual)

    def _recorded(
        self, model: nn.Module, layout: WeightLayout, expected: dict[str, int]
    ) -> Iterator[tuple[str, Tensor]]:
        # The checksums are taken as the weights pass by, so they are gathered only once.
        failure: Exception | None = None
        for name, tensor in named_full_parameters(model, layout.dtypes):
            try:
                if self.verify != "off" and name in layout.dtypes:
                    expected[name] = checksum(tensor, layout.dtypes[name])
            except Exception as error:  # raised at the end: the other ranks gather in step with this one
                failure = failure or error
            yield name, tensor
        if failure is not None:
            raise failure

    def _run_canary(self, model: nn.Module, layout: WeightLayout, score: Scorer) -> CanaryReport:
        trainer_dtype = self.compute_dtype or next(model.parameters()).dtype
        tolerance = self.canary_tolerance or mean_tolerance(trainer_dtype, *layout.dtypes.values(), lossy=layout.lossy)
        # Three stages, so that no rank waits in the scorer's collectives for one whose engine failed.
        completions = self._together(lambda: self.engine.generate(self.requests, CANARY_SAMPLING))
        scored = score(scored_rows(self.requests, completions))
        return self._together(lambda: compare_logprobs(completions, scored, tolerance))

    def _largest(self, *values: float) -> list[float]:
        """Return the largest of all ranks' values, one by one."""
        return [max(each) for each in zip(*self.world.gather(values), strict=True)]

    def _together(self, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank; another rank's error is raised as a SyncError.

        But the failure of an engine is one on all ranks, since all of them must restart theirs.
        """
        return self.world.together(action, SyncError, as_own=EngineFailure)
