"""The diagnostics of the mismatch, as a function and as the torchmetrics collection that runs the same code."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torchmetrics import MetricCollection

from app.maths.correction import Correction, CorrectionConfig, correct
from app.metrics import table
from app.metrics.core import CORE
from app.metrics.detail import DETAIL
from app.metrics.drawing import Histogram, draw_log_ratios, draw_weights
from app.metrics.measure import measure
from app.metrics.rows import Rows
from app.metrics.state import VectorMetric, fused_sync


def diagnose(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    mask: Tensor,
    config: CorrectionConfig | None = None,
    *,
    rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    off_policy_keep: Tensor | None = None,
    policy_lag: Tensor | float | None = None,
) -> dict[str, float]:
    """Return every diagnostic of `app.metrics.table` that has data, by its full key (`rollout_correction/...`).

    Args:
        old_logprobs: [B, T] nats, the trainer's at sampling time.
        rollout_logprobs: [B, T] nats, the engine's; NaN where one is missing. None: the engine gave none.
        mask: [B, T] bool, the valid tokens; other positions are never read.
        config: the correction to report on. None: the weights are the raw token ratios, and the keys of clipping
            and rejection are absent.
        rewards: [B], gives `ratio_reward_corr`.
        advantages: [B], with `off_policy_keep` gives `off_policy_sequence_fraction_negative`.
        off_policy_keep: [B] bool, gives `off_policy_sequence_fraction`.
        policy_lag: [B] or one number, gives `policy_lag`.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the tensor.
    """
    rows = Rows.of(old_logprobs, rollout_logprobs, mask, rewards, advantages, off_policy_keep, policy_lag)
    core, detailed = measure(rows, correction_of(rows, config))
    found = table.core_values(CORE.read(core)) | table.detailed_values(DETAIL.read(detailed))
    return {table.PREFIX + key: value for key, value in found.items()}


def correction_of(rows: Rows, config: CorrectionConfig | None) -> Correction | None:
    """Return what a correction makes of rows, in float64, for those who have none yet. None: nothing is corrected."""
    if config is None:
        return None
    return correct(rows.old_logprobs.double(), rows.rollout_logprobs.double(), rows.mask, config)


class CoreMismatch(VectorMetric):
    """The keys that are measured every step; `compute` gives them without the prefix."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__(CORE)

    def update(self, core: Tensor) -> None:
        """Add a CORE vector of `measure`."""
        self.add(core)

    def compute(self) -> dict[str, float]:
        """Return every diagnostic that has data."""
        return table.core_values(self.totals())


class DetailedMismatch(VectorMetric):
    """The keys of detailed steps, over the rows of those steps only."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__(DETAIL)

    def update(self, detailed: Tensor) -> None:
        """Add a DETAIL vector of `measure`."""
        self.add(detailed)

    def compute(self) -> dict[str, float]:
        """Return every diagnostic that has data."""
        return table.detailed_values(self.totals())

    def histograms(self) -> dict[str, Histogram]:
        """Return this rank's histograms, those of all ranks inside `fused_sync`; empty without data."""
        counts = self.totals().counts
        drawn = {"log_ratio": draw_log_ratios(counts["log_ratio"]), "is_weight": draw_weights(counts["is_weight"])}
        return {name: found for name, found in drawn.items() if found is not None}


class MismatchMetrics(MetricCollection):
    """KL, χ², ESS, PPL and the rest of `app.metrics.table`, accumulated across micro-batches and devices.

    `compute` returns what `diagnose` returns for the concatenation of all rows of all ranks; the keys of detailed
    steps for the concatenation of those steps' rows. All ranks must call it together, whether they had rows or not;
    it costs one collective.
    """

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        """Start empty.

        Args:
            config: the correction to report on where `update` is given none that was computed already; see `diagnose`.
        """
        members = {"core": CoreMismatch(), "detailed": DetailedMismatch()}
        super().__init__(cast(Any, members), prefix=table.PREFIX, compute_groups=False)
        self.config = config

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add rows; the arguments are those of `measured`."""
        super().update(**self.measured(*args, **kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Add rows, and return the diagnostics of these alone; the arguments are those of `measured`."""
        return super().forward(**self.measured(*args, **kwargs))

    def measured(
        self,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor | None,
        mask: Tensor,
        rewards: Tensor | None = None,
        advantages: Tensor | None = None,
        off_policy_keep: Tensor | None = None,
        policy_lag: Tensor | float | None = None,
        correction: Correction | None = None,
        detailed: bool = True,
    ) -> dict[str, Tensor]:
        """Return the vectors of some rows for the members.

        Args:
            old_logprobs: as for `diagnose`, like all up to `policy_lag`.
            rollout_logprobs: see there.
            mask: see there.
            rewards: see there.
            advantages: see there.
            off_policy_keep: see there.
            policy_lag: see there.
            correction: what the loss used of these rows, of `app.maths.correction.correct`: its weights and masks are
                measured. None: they are computed here by the configuration, or measured uncorrected without one.
            detailed: False: measure the core only.
        """
        rows = Rows.of(old_logprobs, rollout_logprobs, mask, rewards, advantages, off_policy_keep, policy_lag)
        core, detail = measure(rows, correction or correction_of(rows, self.config), detailed=detailed)
        return {"core": core, "detailed": detail}

    def compute(self) -> dict[str, float]:
        """Return every diagnostic that has data, over all ranks, by its full key."""
        with fused_sync(self.members()):
            return super().compute()

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms of log-ratios and applied weights of the detailed steps, by full key.

        They are this rank's, or those of all ranks inside `with fused_sync(metrics.members())`.
        """
        found = cast(DetailedMismatch, self["detailed"]).histograms()
        return {table.PREFIX + name: drawn for name, drawn in found.items()}

    def members(self) -> list[VectorMetric]:
        """Return the metrics whose states `fused_sync` merges."""
        return [cast(VectorMetric, member) for member in self.values(copy_state=False)]
