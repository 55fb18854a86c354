"""Loss and correction are set apart from each other; here what contradicts between the two is refused."""

from __future__ import annotations

from app.maths.correction.config import CorrectionConfig
from app.maths.objective.config import LossConfig


def check_combination(loss: LossConfig, correction: CorrectionConfig) -> None:
    """Refuse a loss and a correction that count the mismatch twice, or of which one undoes the other.

    Under `bypass` the loss's own ratio is new / rollout, which corrects; REINFORCE has no ratio, so there weights
    may, and must, correct (verl's policy gradient in bypass mode, the weights being new / rollout).

    Raises:
        ValueError: the first contradiction; the message names both keys and what to do.
    """
    if correction.bypass:
        if correction.log_only:
            raise ValueError(
                "correction.bypass=true with correction.log_only=true: the loss would take its ratios to the rollout "
                "policy all the same; drop one."
            )
        if loss.form.surrogate == "reinforce":
            _check_bypass_without_ratio(loss, correction)
        else:
            _check_bypass_with_ratio(loss, correction)
        if needs_step_sums(loss, correction):
            raise ValueError(
                "correction.bypass with batch_normalize or with loss.denominator=kept: sums over the whole step need "
                "old log-probabilities, which bypass does without; set bypass or batch_normalize to false, or "
                "denominator to all"
            )


def needs_step_sums(loss: LossConfig, correction: CorrectionConfig) -> bool:
    """Return whether a micro-batch needs sums over its whole optimiser step: for a mean weight, or a denominator."""
    normalizes = correction.batch_normalize and not correction.log_only
    counts = loss.denominator == "kept" and loss.form.aggregation != "micro_batch_token_mean"
    return normalizes or counts


def _check_bypass_with_ratio(loss: LossConfig, correction: CorrectionConfig) -> None:
    if correction.level != "none":
        raise ValueError(
            f"correction.bypass=true with correction.level={correction.level!r} and loss.loss_type="
            f"{loss.loss_type!r}: the loss already divides by the rollout policy, a weight would count the mismatch "
            f"twice; use level 'none', bypass=false or loss_type 'reinforce'."
        )


def _check_bypass_without_ratio(loss: LossConfig, correction: CorrectionConfig) -> None:
    if correction.level == "none" and not correction.drops:
        raise ValueError(
            "correction.bypass=true with loss.loss_type='reinforce': that loss has no ratio, and without a level, "
            "rejection or veto nothing corrects; set correction.level or use another loss_type."
        )
    if loss.use_bias_correction_kl and correction.level != "none" and correction.weight_kl:
        raise ValueError(
            "loss.use_bias_correction_kl=true with correction.bypass=true and correction.weight_kl=true: the KL term "
            "would be multiplied by new / rollout twice; set one of the three to false."
        )
