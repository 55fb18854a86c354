"""Settings that contradict each other, refused before anything is trained."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from app.errors import LockstepError
from app.maths.correction import CorrectionConfig
from app.maths.objective import LossConfig
from app.rollout.datamodule import RolloutDataModule


def check_module(loss: LossConfig, off_policy_delta: float | None, teacher: str | None) -> None:
    """Refuse settings of the module that contradict each other.

    Raises:
        ValueError: naming the keys.
    """
    if off_policy_delta is not None and teacher is not None:
        raise ValueError(
            "model.off_policy_sequence_mask_delta with model.teacher_model_name_or_path: the mask goes by the sign "
            "of the reward's advantage and would drop rows that the teacher still corrects; use one of them"
        )
    if teacher is not None and not loss.beta > 0:
        raise ValueError("model.teacher_model_name_or_path does nothing without model.loss.beta above 0")


def check_data(datamodule: RolloutDataModule, loss: LossConfig, correction: CorrectionConfig) -> None:
    """Refuse settings of the module that contradict the data module's.

    Raises:
        LockstepError: if the engine or the data module cannot give what the settings need.
    """
    if correction.changes_gradients and not datamodule.engine.returns_logprobs:
        raise LockstepError(
            f"{type(datamodule.engine).__name__} gives no log-probabilities, so nothing can be corrected: set "
            f"model.correction.preset to null, or sample with another engine"
        )
    plan = datamodule.plan()
    if loss.kl_in_reward and plan.multi_objective_aggregation == "normalize_then_sum":
        raise LockstepError(
            "model.loss.kl_in_reward with data.multi_objective_aggregation=normalize_then_sum: the penalty belongs "
            "to the sum of the rewards, which is never formed; set kl_in_reward to false"
        )
    if loss.loss_type == "reinforce" and plan.steps > 1 and not correction.bypass:
        rank_zero_warn(
            f"model.loss.loss_type=reinforce has no ratio to the old policy: in {plan.steps} optimiser steps a "
            "rollout the staleness stays uncorrected; use model.correction.preset=verl/bypass_pg_is, or one step"
        )


def check_trainer(trainer: Any) -> None:
    """Refuse a schedule that does not step with each optimiser step, and an epoch that ends inside one.

    Raises:
        LockstepError: naming the settings.
    """
    if [(each.interval, each.frequency) for each in trainer.lr_scheduler_configs] != [("step", 1)]:
        raise LockstepError(
            "configure_optimizers: give one learning-rate schedule with interval 'step' and frequency 1; a step is "
            "closed (logged, decided by) when its schedule steps"
        )
    if trainer.num_training_batches % trainer.accumulate_grad_batches:
        raise LockstepError(
            f"trainer.limit_train_batches, overfit_batches or fast_dev_run: an epoch of "
            f"{trainer.num_training_batches} micro-batches ends inside an optimiser step of "
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}; use a multiple of it"
        )
