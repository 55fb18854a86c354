"""What the loss sees of a micro-batch: importance weights, the tokens it may use, and what it is divided by."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from app.guards.run_control import RunControl
from app.maths.correction import Correction, CorrectionConfig, correct, mean_weight, weight_sums
from app.maths.objective import LossConfig, LossParts, policy_objective
from app.maths.offpolicy import kept_rows, row_drift, token_drift
from app.types import StepSums, TrainBatch


@dataclass(frozen=True, kw_only=True)
class OffPolicyRows:
    """What the off-policy sequence mask made of the rows of a micro-batch."""

    keep: Tensor
    """[B] bool: False where a row is dropped."""
    drift: Tensor
    """[B] mean of behaviour - new over a row's tokens, nats: what it is judged by."""
    difference: Tensor
    """[B, T] behaviour - new of each token, nats; 0 where masked or missing."""


@dataclass(frozen=True, kw_only=True)
class CorrectedBatch:
    """A micro-batch as the loss takes it. No tensor carries a gradient."""

    old_logprobs: Tensor
    """[B, T] nats, what the correction compared with the rollout's."""
    anchor_logprobs: Tensor
    """[B, T] nats, what the loss takes its ratio to: old, or the rollout's under bypass."""
    correction: Correction
    """The weights and masks of the rollout correction: the loss uses them, and the metrics measure the same."""
    correctable: bool
    """False: rows came without log-probabilities, and no rank corrects this step."""
    keep_mask: Tensor
    """[B, T] bool: tokens that the surrogate uses."""
    kl_mask: Tensor
    """[B, T] bool: tokens that the KL term uses, those of rows dropped by the off-policy mask too (as in its paper)."""
    off_policy: OffPolicyRows | None
    """What the off-policy mask made of the rows. None: there is no off-policy mask."""
    denominator_mask: Tensor
    """[B, T] bool: tokens that the loss is divided by."""
    total_tokens: int
    """Tokens that the loss is divided by in the whole optimiser step."""
    total_rows: int
    """Rows with such a token in the whole optimiser step."""


class StepCorrection:
    """Applies the correction in force, the off-policy mask and the filters of the rollout to micro-batches.

    Args:
        run_control: whose correction is applied, whatever it is when a micro-batch comes.
        loss: the objective that the corrected micro-batches are for.
        off_policy_delta: threshold of the off-policy sequence mask, nats per token. None: there is no such mask.

    Raises:
        ValueError: if the threshold is negative or not finite.
    """

    def __init__(self, run_control: RunControl, loss: LossConfig, off_policy_delta: float | None) -> None:
        if off_policy_delta is not None and not 0 <= off_policy_delta < math.inf:
            raise ValueError(f"model.off_policy_sequence_mask_delta={off_policy_delta}: must be finite, 0 or more nats")
        self.run_control = run_control
        self.loss = loss
        self.off_policy_delta = off_policy_delta

    @property
    def settings(self) -> dict[str, Any]:
        """What it does now, as plain values by the keys of the configuration."""
        return {
            "model.loss": dataclasses.asdict(self.loss),
            "model.correction": dataclasses.asdict(self.run_control.correction),
            "model.off_policy_sequence_mask_delta": self.off_policy_delta,
        }

    @torch.no_grad()
    def step_sums(self, batch: TrainBatch) -> StepSums:
        """Return the sums over the rows of `batch`, which must carry old log-probabilities."""
        assert batch.old_logprobs is not None
        config = self._config(batch)
        found = correct(batch.old_logprobs, batch.rollout_logprobs, batch.mask, config, normalizer=1.0)
        usable = found.mask & batch.loss_mask
        weight_sum, weight_count = weight_sums(found.is_weights, batch.mask, config).tolist()
        return StepSums(
            weight_sum=weight_sum,
            weight_count=weight_count,
            kept_tokens=int(usable.sum()),
            kept_rows=int(usable.any(dim=1).sum()),
        )

    @torch.no_grad()
    def apply(self, batch: TrainBatch, new_logprobs: Tensor) -> CorrectedBatch:
        """Return what the loss takes, for current log-probabilities [B, T]."""
        new = new_logprobs.detach()
        bypass = self.run_control.correction.bypass and batch.correctable
        old = new if batch.old_logprobs is None or bypass else batch.old_logprobs
        if not batch.correctable and self.run_control.correction.changes_gradients:
            rank_zero_warn("rows came without the engine's log-probabilities: the step runs UNCORRECTED on every rank")
        sums = batch.totals.sums
        normalizer = (
            None
            if sums is None
            else mean_weight(torch.tensor([sums.weight_sum, sums.weight_count], dtype=torch.float64))
        )
        correction = correct(old, batch.rollout_logprobs, batch.mask, self._config(batch), normalizer=normalizer)
        off_policy = self._off_policy(batch, new, old)
        usable = correction.mask & batch.loss_mask
        denominator_mask, tokens, rows = batch.mask, batch.totals.tokens, batch.totals.rows
        if self.loss.denominator == "kept":
            denominator_mask = usable
            if sums is not None:
                tokens, rows = sums.kept_tokens, sums.kept_rows
        return CorrectedBatch(
            old_logprobs=old,
            anchor_logprobs=torch.where(batch.rollout_logprobs.isnan(), old, batch.rollout_logprobs) if bypass else old,
            correction=correction,
            correctable=batch.correctable,
            keep_mask=usable if off_policy is None else usable & off_policy.keep[:, None],
            kl_mask=usable,
            off_policy=off_policy,
            denominator_mask=denominator_mask,
            total_tokens=tokens,
            total_rows=rows,
        )

    def _config(self, batch: TrainBatch) -> CorrectionConfig:
        """The correction to apply: none where some rank has rows without log-probabilities."""
        return self.run_control.correction if batch.correctable else CorrectionConfig()

    def _off_policy(self, batch: TrainBatch, new: Tensor, old: Tensor) -> OffPolicyRows | None:
        if self.off_policy_delta is None:
            return None
        behaviour = batch.rollout_logprobs if batch.correctable else old
        difference = token_drift(new, behaviour, batch.mask)
        drift = row_drift(difference, batch.mask)
        keep = kept_rows(drift, batch.advantages, self.off_policy_delta)
        return OffPolicyRows(keep=keep, drift=drift, difference=difference)

    def objective(self, batch: TrainBatch, new_logprobs: Tensor) -> tuple[CorrectedBatch, LossParts]:
        """Return what the loss sees of a micro-batch, and its share of the optimiser step's loss.

        Args:
            batch: its rows, with the totals of the whole optimiser step.
            new_logprobs: [B, T] nats, with gradient.
        """
        corrected = self.apply(batch, new_logprobs)
        parts = policy_objective(
            new_logprobs,
            corrected.anchor_logprobs,
            batch.mask,
            batch.advantages,
            is_weights=corrected.correction.is_weights,
            keep_mask=corrected.keep_mask,
            kl_mask=corrected.kl_mask,
            weight_kl=self.run_control.correction.weight_kl,
            ref_logprobs=batch.ref_logprobs,
            config=self.loss,
            denominator_mask=corrected.denominator_mask,
            total_tokens=corrected.total_tokens,
            total_rows=corrected.total_rows,
            micro_batches=batch.totals.micro_batches,
        )
        return corrected, parts
