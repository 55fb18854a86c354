"""The training objective: which loss, its KL penalty, and their sum over a micro-batch."""

from app.maths.objective.combination import check_combination, needs_step_sums
from app.maths.objective.compute import LossParts, policy_objective
from app.maths.objective.config import LOSS_FORMS, LossConfig, LossForm
from app.maths.objective.kl import reward_kl_penalty

__all__ = [
    "LOSS_FORMS",
    "LossConfig",
    "LossForm",
    "LossParts",
    "check_combination",
    "needs_step_sums",
    "policy_objective",
    "reward_kl_penalty",
]
