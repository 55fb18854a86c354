"""What a rollout correction is asked to do; a setting that contradicts another, or would do nothing, is refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["none", "token", "sequence", "geometric"]
BoundLevel = Literal["token", "sequence", "geometric"]
Control = Literal["truncate", "mask"]
RuleLevel = Literal["token", "sequence", "geometric", "max"]
Statistic = Literal["ratio", "k2", "k3"]


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}.")


def _check_bounds(names: tuple[str, str], lower: float | None, upper: float | None) -> None:
    for name, value in zip(names, (lower, upper), strict=True):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value}: a bound is a finite number above 0; null means no bound.")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"{names[0]}={lower} is above {names[1]}={upper}: nothing could pass; swap them.")


@dataclass(frozen=True, kw_only=True)
class RejectionRule:
    """Drops tokens, or whole rows, whose train / rollout mismatch is too large. It never changes a weight.

    The level says how the token statistics of a row are pooled: `token` judges each token alone; `sequence`
    takes the row's product of ratios, or sum of k2 or k3; `geometric` the row's geometric mean of ratios, or
    mean of k2 or k3; `max` lets the row's worst token decide. All but `token` drop the whole row.

    Raises:
        ValueError: an unknown name, a bound that is not above 0, no bound at all, or a lower bound on k2 or k3.
    """

    level: RuleLevel
    """Pooling over the row, see above."""
    statistic: Statistic = "ratio"
    """`ratio`: rho = train / rollout. `k2`: l^2 / 2. `k3`: e^l - 1 - l, with l = log rho."""
    lower: float | None = None
    """Least ratio kept (equality keeps). Only for `ratio`: a divergence is best at 0. None: no bound."""
    upper: float | None = None
    """Largest value kept (equality keeps). None: no bound."""

    def __post_init__(self) -> None:
        _check_choice("rejection.level", self.level, get_args(RuleLevel))
        _check_choice("rejection.statistic", self.statistic, get_args(Statistic))
        _check_bounds(("rejection.lower", "rejection.upper"), self.lower, self.upper)
        if self.lower is None and self.upper is None:
            raise ValueError("rejection: a rule without lower and upper keeps everything; give a bound or drop it.")
        if self.statistic != "ratio" and self.lower is not None:
            raise ValueError(f"rejection.lower={self.lower}: {self.statistic} is 0 at a perfect match; use upper only.")


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """How the mismatch between `old_logprobs` and `rollout_logprobs` is corrected. The default only measures.

    Raises:
        ValueError: a setting that is unknown, contradicts another or would do nothing; the message names the key.
    """

    level: Level = "none"
    """Of the importance weight: `token` ratio, `sequence` product, `geometric` mean, or `none`: all weights 1."""
    bound_level: BoundLevel | None = None
    """Level at which `mask` tests the bounds. None: as `level`."""
    control: Control = "truncate"
    """`truncate`: clamp the weight to the bounds. `mask`: weight 0 outside the bounds, untouched inside."""
    lower: float | None = None
    """Least ratio, rho = train / rollout. None: no bound."""
    upper: float | None = None
    """Largest ratio. None: no bound (refused with `truncate`)."""
    rejection: tuple[RejectionRule, ...] = ()
    """Rules that edit the mask; a token is kept when all of them keep it. A list, or mappings, are taken too."""
    veto_low: float | None = None
    """A row with any token ratio below it is dropped whole. None: no veto."""
    veto_high: float | None = None
    """A row with any token ratio above it is dropped whole. None: no veto."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the optimiser step: over tokens, or over rows for row levels."""
    bypass: bool = False
    """The loss takes `rollout_logprobs` as old policy, which saves a forward; its own ratio then corrects. Weights go
    with it only under the loss type 'reinforce', which has no ratio (`app.maths.objective.check_combination`)."""
    weight_kl: bool = True
    """The weight also multiplies the beta * KL term."""
    log_only: bool = False
    """Measure the correction, but train with weights of 1 and nothing dropped."""

    def __post_init__(self) -> None:
        rules = tuple(RejectionRule(**rule) if isinstance(rule, Mapping) else rule for rule in self.rejection)
        object.__setattr__(self, "rejection", rules)
        _check_choice("correction.level", self.level, get_args(Level))
        _check_choice("correction.control", self.control, get_args(Control))
        if self.bound_level is not None:
            _check_choice("correction.bound_level", self.bound_level, get_args(BoundLevel))
        _check_bounds(("correction.lower", "correction.upper"), self.lower, self.upper)
        _check_bounds(("correction.veto_low", "correction.veto_high"), self.veto_low, self.veto_high)
        if self.level == "none":
            self._check_without_weights()
        else:
            self._check_control()

    @property
    def drops(self) -> bool:
        """Whether any rule or the veto may take tokens out of the loss."""
        return bool(self.rejection) or self.vetoes

    @property
    def vetoes(self) -> bool:
        """Whether rows with one token out of bounds are dropped whole."""
        return self.veto_low is not None or self.veto_high is not None

    @property
    def bounds_tokens(self) -> bool:
        """Whether the bounds are tested on tokens, and not on rows."""
        return (self.bound_level or self.level) == "token"

    @property
    def changes_gradients(self) -> bool:
        """Whether any gradient differs from that without a correction."""
        return not self.log_only and (self.level != "none" or self.drops or self.bypass)

    def _check_without_weights(self) -> None:
        for name in ("lower", "upper", "bound_level"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"correction.{name}={value} does nothing at level 'none'; set a level or drop it.")
        if self.control == "mask":
            raise ValueError("correction.control='mask' does nothing at level 'none'; set a level or drop it.")
        if self.batch_normalize:
            raise ValueError("correction.batch_normalize=true does nothing at level 'none'; set a level or drop it.")

    def _check_control(self) -> None:
        if self.control == "truncate" and self.upper is None:
            raise ValueError("correction.control='truncate' needs correction.upper, the largest weight (2.0 is usual).")
        if self.control == "mask" and self.lower is None and self.upper is None:
            raise ValueError("correction.control='mask' needs correction.lower or correction.upper.")
        if self.control == "truncate" and self.bound_level not in (None, self.level):
            raise ValueError(
                f"correction.bound_level={self.bound_level!r} with control 'truncate': a weight is clamped at its own "
                f"level, {self.level!r}; drop bound_level or use control 'mask'."
            )
