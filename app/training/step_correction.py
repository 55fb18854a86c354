"""What the loss sees of a micro-batch: importance weights, the tokens it may use, and what it is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from app.maths.correction import CorrectionConfig, correct, mean_weight, weight_sums
from app.maths.masking import select
from app.maths.objective import LossConfig, check_combination
from app.maths.offpolicy import sequence_drift, sequence_keep
from app.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class OffPolicyRows:
    """What the off-policy sequence mask made of the rows of a micro-batch."""

    keep: Tensor
    """[B] bool: False where a row is dropped."""
    drift: Tensor
    """[B] mean of behaviour - new over a row's tokens, nats: what it is judged by."""
    difference: Tensor
    """[B, T] behaviour - new of each token, nats; 0 where masked."""


@dataclass(frozen=True, kw_only=True)
class CorrectedBatch:
    """A micro-batch as the loss takes it. No tensor carries a gradient."""

    old_logprobs: Tensor
    """[B, T] nats, what the correction compared with the rollout's."""
    anchor_logprobs: Tensor
    """[B, T] nats, what the loss takes its ratio to: old, or the rollout's under bypass."""
    is_weights: Tensor
    """[B, T], see `Correction.is_weights`."""
    keep_mask: Tensor
    """[B, T] bool: tokens that the loss uses."""
    off_policy: OffPolicyRows | None
    """None: there is no off-policy mask."""
    denominator_mask: Tensor
    """[B, T] bool: tokens that the loss is divided by."""
    total_tokens: int
    """How many of them the whole optimiser step has."""
    total_rows: int
    """Rows with such a token in the same."""


class StepCorrection:
    """Applies the rollout correction, the off-policy mask and the filters of the rollout to micro-batches.

    Raises:
        ValueError: settings that contradict each other; the message names the keys.
    """

    def __init__(self, correction: CorrectionConfig, loss: LossConfig, off_policy_delta: float | None) -> None:
        check_combination(loss, correction)
        if off_policy_delta is not None and not off_policy_delta >= 0:
            raise ValueError(f"model.off_policy_sequence_mask_delta={off_policy_delta}: must be 0 or more nats")
        self.correction = correction
        self.loss = loss
        self.off_policy_delta = off_policy_delta
        if correction.bypass and self.needs_step_sums:
            raise ValueError(
                "model.correction.bypass with batch_normalize or with model.loss.denominator=kept: sums over the whole "
                "step need old log-probabilities, which bypass does without; set one of them back"
            )

    @property
    def changes_gradients(self) -> bool:
        """Whether the correction, leaving the off-policy mask aside, changes any gradient."""
        config = self.correction
        drops = bool(config.rejection) or config.veto_low is not None or config.veto_high is not None
        return not config.log_only and (config.level != "none" or drops or config.bypass)

    @property
    def needs_step_sums(self) -> bool:
        """Whether a micro-batch needs sums over its whole optimiser step: for a mean weight, or a denominator."""
        normalizes = self.correction.batch_normalize and not self.correction.log_only
        return normalizes or self.loss.denominator == "kept"

    @torch.no_grad()
    def step_sums(self, batch: TrainBatch) -> tuple[float, ...]:
        """Return the sum and number of weights (see `weight_sums`), and the numbers of usable tokens and rows."""
        assert batch.old_logprobs is not None
        config = self._config(batch)
        found = correct(batch.old_logprobs, batch.rollout_logprobs, batch.mask, config, normalizer=1.0)
        usable = found.mask & batch.loss_mask
        return (
            *weight_sums(found.measured_weights, batch.mask, config).tolist(),
            float(usable.sum()),
            float(usable.any(dim=1).sum()),
        )

    @torch.no_grad()
    def apply(self, batch: TrainBatch, new_logprobs: Tensor) -> CorrectedBatch:
        """Return what the loss takes, for current log-probabilities [B, T]."""
        new = new_logprobs.detach()
        old = new if batch.old_logprobs is None or self.correction.bypass else batch.old_logprobs
        if not batch.correctable:
            rank_zero_warn("rows came without the engine's log-probabilities: the step runs UNCORRECTED on every rank")
        sums = batch.totals.correction
        normalizer = None if sums is None else mean_weight(torch.tensor(sums[:2], dtype=torch.float64))
        correction = correct(old, batch.rollout_logprobs, batch.mask, self._config(batch), normalizer=normalizer)
        off_policy = self._off_policy(batch, new, old)
        usable = correction.mask & batch.loss_mask
        denominator_mask, tokens, rows = batch.mask, batch.totals.tokens, batch.totals.rows
        if self.loss.denominator == "kept" and sums is not None:
            denominator_mask, tokens, rows = usable, int(sums[2]), int(sums[3])
        return CorrectedBatch(
            old_logprobs=old,
            anchor_logprobs=self._anchor(batch, old),
            is_weights=correction.is_weights,
            keep_mask=usable if off_policy is None else usable & off_policy.keep[:, None],
            off_policy=off_policy,
            denominator_mask=denominator_mask,
            total_tokens=tokens,
            total_rows=rows,
        )

    def _config(self, batch: TrainBatch) -> CorrectionConfig:
        """The correction to apply: none where some rank has rows without log-probabilities."""
        return self.correction if batch.correctable else CorrectionConfig()

    def _anchor(self, batch: TrainBatch, old: Tensor) -> Tensor:
        if not self.correction.bypass or not batch.correctable:
            return old
        return torch.where(batch.rollout_logprobs.isnan(), old, batch.rollout_logprobs)

    def _off_policy(self, batch: TrainBatch, new: Tensor, old: Tensor) -> OffPolicyRows | None:
        if self.off_policy_delta is None:
            return None
        behaviour = batch.rollout_logprobs if batch.correctable else old
        return OffPolicyRows(
            keep=sequence_keep(new, behaviour, batch.mask, batch.advantages, self.off_policy_delta),
            drift=sequence_drift(new, behaviour, batch.mask),
            difference=select(behaviour - new, batch.mask),
        )
