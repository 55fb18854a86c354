"""The diagnostics of the mismatch, as a function and as the torchmetrics collection that runs the same code."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from app.maths.correction import CorrectionConfig
from app.metrics import table
from app.metrics.measure import LAYOUT, Rows, measure
from app.metrics.position import PositionMismatch
from app.metrics.vector import VectorMetric


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
    rows = _rows(old_logprobs, rollout_logprobs, mask, rewards, advantages, off_policy_keep, policy_lag)
    found = table.values(LAYOUT.read(measure(rows, config)))
    return {table.PREFIX + key: value for key, value in found.items()}


class MismatchMetric(VectorMetric):
    """`diagnose` over everything seen since the last reset, on all ranks; `compute` gives keys without the prefix."""

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        """See `diagnose` for `config`."""
        super().__init__(LAYOUT)
        self.config = config

    def update(
        self,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor | None,
        mask: Tensor,
        rewards: Tensor | None = None,
        advantages: Tensor | None = None,
        off_policy_keep: Tensor | None = None,
        policy_lag: Tensor | float | None = None,
    ) -> None:
        """Add rows. The arguments are those of `diagnose`."""
        rows = _rows(old_logprobs, rollout_logprobs, mask, rewards, advantages, off_policy_keep, policy_lag)
        self.add(measure(rows, self.config))

    def compute(self) -> dict[str, float]:
        """Return every diagnostic that has data."""
        return table.values(self.totals())


class MismatchMetrics(MetricCollection):
    """KL, χ², ESS, PPL and the rest of `app.metrics.table`, accumulated across micro-batches and devices.

    `update` takes the arguments of `diagnose` (all but `config`); `compute` returns exactly what `diagnose` returns
    for the concatenation of all rows of all ranks, with the mismatch by position beside it. All ranks must call
    `compute` together, whether they had rows or not.
    """

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        """See `diagnose` for `config`."""
        super().__init__([MismatchMetric(config), PositionMismatch()], prefix=table.PREFIX, compute_groups=False)


def _rows(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    mask: Tensor,
    rewards: Tensor | None,
    advantages: Tensor | None,
    off_policy_keep: Tensor | None,
    policy_lag: Tensor | float | None,
) -> Rows:
    if policy_lag is not None and not isinstance(policy_lag, Tensor):
        policy_lag = torch.full(mask.shape[:1], float(policy_lag), dtype=torch.float64, device=mask.device)
    if rollout_logprobs is None:
        rollout_logprobs = torch.full_like(old_logprobs, torch.nan)
    return Rows(
        old_logprobs=old_logprobs.detach(),
        rollout_logprobs=rollout_logprobs.detach(),
        mask=mask,
        rewards=rewards,
        advantages=advantages,
        off_policy_keep=off_policy_keep,
        policy_lag=policy_lag,
    )
