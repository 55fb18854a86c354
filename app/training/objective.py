"""The loss of one micro-batch: correction and objective together, for training and for a replay of it."""

from __future__ import annotations

from torch import Tensor

from app.maths.objective import LossParts, policy_objective
from app.training.step_correction import CorrectedBatch, StepCorrection
from app.types import TrainBatch


def micro_batch_objective(
    batch: TrainBatch, new_logprobs: Tensor, step_correction: StepCorrection
) -> tuple[CorrectedBatch, LossParts]:
    """Return what the loss sees of a micro-batch, and its share of the optimiser step's loss.

    Args:
        batch: its rows, with the totals of the whole optimiser step.
        new_logprobs: [B, T] nats, with gradient.
        step_correction: the correction and the loss to apply.
    """
    corrected = step_correction.apply(batch, new_logprobs)
    parts = policy_objective(
        new_logprobs,
        corrected.anchor_logprobs,
        batch.mask,
        batch.advantages,
        is_weights=corrected.is_weights,
        keep_mask=corrected.keep_mask,
        kl_mask=corrected.kl_mask,
        weight_kl=step_correction.correction.weight_kl,
        ref_logprobs=batch.ref_logprobs,
        config=step_correction.loss,
        denominator_mask=corrected.denominator_mask,
        total_tokens=corrected.total_tokens,
        total_rows=corrected.total_rows,
        micro_batches=batch.totals.micro_batches,
    )
    return corrected, parts
