"""Which objective is minimised; a setting that contradicts another, or would do nothing, is refused."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "gspo-token", "cispo", "sapo", "reinforce"]
SurrogateName = Literal["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce"]
Aggregation = Literal["token_mean", "row_mean", "constant_length", "micro_batch_token_mean"]
Denominator = Literal["all", "kept"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class LossForm:
    """What a loss type stands for: a surrogate, how its tokens become a scalar, and the clip."""

    surrogate: SurrogateName
    """Function of `app.maths.losses`: the loss of a token."""
    aggregation: Aggregation
    """Function of `app.maths.aggregate`: from tokens to a scalar."""
    epsilon_low: float | None = None
    """The ratio is clipped at 1 - epsilon_low. None: the surrogate has no clip."""
    epsilon_high: float | None = None
    """The ratio is clipped at 1 + epsilon_high. None: the surrogate has no clip."""


LOSS_FORMS: Mapping[LossType, LossForm] = MappingProxyType(
    {
        # DeepSeekMath, arXiv 2402.03300
        "grpo": LossForm(surrogate="ppo_clip", aggregation="row_mean", epsilon_low=0.2, epsilon_high=0.2),
        # TRL and ms-swift only: the token mean of each micro-batch
        "bnpo": LossForm(surrogate="ppo_clip", aggregation="micro_batch_token_mean", epsilon_low=0.2, epsilon_high=0.2),
        # arXiv 2503.20783
        "dr_grpo": LossForm(surrogate="ppo_clip", aggregation="constant_length", epsilon_low=0.2, epsilon_high=0.2),
        # arXiv 2503.14476
        "dapo": LossForm(surrogate="ppo_clip", aggregation="token_mean", epsilon_low=0.2, epsilon_high=0.28),
        # arXiv 2507.18071, both
        "gspo": LossForm(surrogate="gspo", aggregation="row_mean", epsilon_low=3e-4, epsilon_high=4e-4),
        "gspo-token": LossForm(surrogate="gspo_token", aggregation="row_mean", epsilon_low=3e-4, epsilon_high=4e-4),
        # MiniMax-M1, arXiv 2506.13585: no lower bound; the ratio's upper bound is 5, as in TRL for ScaleRL (2510.13786)
        "cispo": LossForm(surrogate="cispo", aggregation="token_mean", epsilon_low=1.0, epsilon_high=4.0),
        # arXiv 2511.20347
        "sapo": LossForm(surrogate="sapo", aggregation="row_mean"),
        # Williams 1992
        "reinforce": LossForm(surrogate="reinforce", aggregation="token_mean"),
    }
)
"""Loss type -> what it stands for. The names are TRL's and ms-swift's; `LossConfig` can replace each part but the
surrogate."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Which objective is minimised. Names are TRL's where it has the same thing.

    Raises:
        ValueError: a setting that is unknown, out of range, contradicts another or would do nothing; the message
            names the key.
    """

    loss_type: LossType = "dapo"
    """Surrogate, aggregation and clip together, see `LOSS_FORMS`; each of the last two can be set below."""
    epsilon_low: float | None = None
    """The ratio is clipped at 1 - epsilon_low. None: as `loss_type` has it."""
    epsilon_high: float | None = None
    """The ratio is clipped at 1 + epsilon_high, also for cispo, where TRL's is the bound itself. None: as `loss_type`
    has it."""
    delta: float | None = None
    """Largest ratio where the advantage is negative (grpo, bnpo, dr_grpo, dapo), above 1 + epsilon_high. None:
    unbounded."""
    sapo_temperature_pos: float = 1.0
    """SAPO's tau for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """SAPO's tau for the others."""
    aggregation: Aggregation | None = None
    """From tokens to a scalar, see `app.maths.aggregate`. None: as `loss_type` has it."""
    denominator: Denominator = "all"
    """What an aggregation divides by. `all`: the tokens (rows) before rejection, so that a dropped token leaves the
    others' gradient as it is. `kept`: those left after rejection, veto and the masks known before the step."""
    max_completion_length: int | None = None
    """Tokens a completion may have; the divisor of `constant_length`, unused otherwise."""
    beta: float = 0.0
    """Weight of KL(new || reference). 0: no penalty."""
    kl_estimator: KLEstimator | None = None
    """Per-token estimator of that KL, see `app.maths.divergence`. None: k3 in the loss, k1 in the reward. k1 in the
    loss has no expected gradient on-policy, unless `use_bias_correction_kl`."""
    kl_in_reward: bool = False
    """Subtract beta * KL from the row's reward instead of adding it to the loss."""
    use_bias_correction_kl: bool = False
    """The KL term in the loss is multiplied by the token ratio new / old, with gradient: value and gradient of k1 and
    k3 are then unbiased for rows that old sampled (DeepSeek-V3.2, arXiv 2512.02556)."""

    def __post_init__(self) -> None:
        choices = (
            ("loss_type", LossType),
            ("aggregation", Aggregation),
            ("denominator", Denominator),
            ("kl_estimator", KLEstimator),
        )
        for name, kind in choices:
            value = getattr(self, name)
            if value not in get_args(kind) and not (value is None and name in ("aggregation", "kl_estimator")):
                raise ValueError(f"loss.{name}={value!r} is unknown; choose one of {', '.join(get_args(kind))}.")
        self._check_clip()
        if not (self.sapo_temperature_pos > 0 and self.sapo_temperature_neg > 0):
            raise ValueError("loss.sapo_temperature_pos and loss.sapo_temperature_neg must be above 0.")
        if self.loss_type != "sapo" and (self.sapo_temperature_pos, self.sapo_temperature_neg) != (1.0, 1.05):
            raise ValueError(
                f"loss.sapo_temperature_pos and loss.sapo_temperature_neg do nothing with loss_type {self.loss_type!r}."
            )
        if self.form.aggregation == "constant_length" and not (self.max_completion_length or 0) > 0:
            raise ValueError("loss.aggregation='constant_length' needs loss.max_completion_length, in tokens.")
        self._check_kl()

    def _check_clip(self) -> None:
        form = self.form
        if LOSS_FORMS[self.loss_type].epsilon_low is None:
            for name in ("epsilon_low", "epsilon_high"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"loss.{name}={value} does nothing with loss_type {self.loss_type!r}: it has no clip; drop it."
                    )
        if form.epsilon_low is not None and not 0 <= form.epsilon_low <= 1:
            raise ValueError(f"loss.epsilon_low={form.epsilon_low}: 1 - epsilon_low must lie between 0 and 1.")
        if form.epsilon_high is not None and not form.epsilon_high >= 0:
            raise ValueError(f"loss.epsilon_high={form.epsilon_high} must be 0 or more.")
        if self.delta is None:
            return
        if form.surrogate != "ppo_clip":
            raise ValueError(
                f"loss.delta={self.delta} does nothing with loss_type {self.loss_type!r}; it belongs to grpo, bnpo, "
                f"dr_grpo and dapo."
            )
        assert form.epsilon_high is not None  # ppo_clip always has one
        if not self.delta > 1 + form.epsilon_high:
            raise ValueError(f"loss.delta={self.delta} must be above 1 + epsilon_high = {1 + form.epsilon_high}.")

    def _check_kl(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"loss.beta={self.beta} must be a finite number, 0 or more.")
        if self.beta == 0 and self.kl_estimator is not None:
            raise ValueError(f"loss.kl_estimator={self.kl_estimator!r} does nothing with loss.beta=0; set beta.")
        for name in ("kl_in_reward", "use_bias_correction_kl"):
            if getattr(self, name) and self.beta == 0:
                raise ValueError(f"loss.{name}=true does nothing with loss.beta=0: there is no penalty; set beta.")
        if self.use_bias_correction_kl and self.kl_in_reward:
            raise ValueError(
                "loss.use_bias_correction_kl=true does nothing with loss.kl_in_reward=true: the loss then has no KL "
                "term; drop one."
            )

    @property
    def form(self) -> LossForm:
        """What is in force: the row of `LOSS_FORMS`, with the values given here in the place of its own."""
        given: dict[str, Any] = {name: getattr(self, name) for name in ("aggregation", "epsilon_low", "epsilon_high")}
        given = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(LOSS_FORMS[self.loss_type], **given)

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.beta > 0 and not self.kl_in_reward

    @property
    def kl_estimator_in_force(self) -> KLEstimator:
        """`kl_estimator`, or the default of the place where the penalty stands."""
        return self.kl_estimator or ("k1" if self.kl_in_reward else "k3")
