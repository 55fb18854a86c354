"""The controller of a correction's bound, in a closed loop with synthetic log-ratios in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from app.maths.correction import CorrectionConfig
from app.training.correction_switch import with_upper
from app.training.threshold import Steered, ThresholdConfig, ThresholdController

TRUNCATE = CorrectionConfig(level="token", control="truncate", upper=2.0)
MASK = CorrectionConfig(level="token", control="mask", lower=0.5, upper=2.0)


def settings(metric: Steered = "ess_exact", target: float = 0.9, **changed: float) -> ThresholdConfig:
    given = {"tolerance": 0.25, "every_n_values": 1, "min_upper": 1.05, "max_upper": 10.0, "max_change": 1.25}
    return ThresholdConfig(metric=metric, target=target, **{**given, **changed})  # type: ignore[arg-type]


def ratios(spread: float, seed: int) -> torch.Tensor:
    """exp(l) of 20 000 normal log-ratios of so many nats, of mean 1: those of a real mismatch average to 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(20_000, generator=generator, dtype=torch.float64)
    return (spread * drawn - spread**2 / 2).exp()


def measured(metric: Steered, upper: float, spread: float, seed: int = 0) -> float:
    """By the definitions: Kish's share of the truncated weights; the share of ratios above the bound."""
    found = ratios(spread, seed)
    if metric == "clipped_frac":
        return float((found > upper).double().mean())
    weights = found.clamp(max=upper)
    return float(weights.mean() ** 2 / weights.square().mean())


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 2.0])
def test_a_looser_bound_leaves_fewer_effective_samples_and_clips_less(spread: float) -> None:
    bounds = [1.05, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]
    for metric in ("ess_exact", "clipped_frac"):
        values = [measured(metric, bound, spread) for bound in bounds]  # type: ignore[arg-type]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("metric", "target", "spread"),
    [("ess_exact", 0.8, 0.5), ("ess_exact", 0.6, 1.0), ("clipped_frac", 0.05, 0.5), ("clipped_frac", 0.02, 0.2)],
)
def test_it_reaches_the_target_and_stays(metric: Steered, target: float, spread: float) -> None:
    config = settings(metric, target)
    controller = ThresholdController(config)
    controller.steer(TRUNCATE)
    uppers = []
    for step in range(120):
        assert controller.upper is not None
        controller.see(measured(metric, controller.upper, spread, seed=step))
        uppers.append(controller.upper)
    low, high = config.band
    slack = 0.1 * (high - low)  # the values are of 20 000 tokens
    late = [measured(metric, upper, spread, seed=1000) for upper in uppers[60:]]
    assert all(low - slack <= value <= high + slack for value in late)
    assert max(uppers[60:]) / min(uppers[60:]) < 1.2  # it does not swing
    assert all(config.min_upper <= upper <= config.max_upper for upper in uppers)
    steps = [math.log(b) / math.log(a) for a, b in itertools.pairwise(uppers)]
    assert all(1 / 1.2501 < step < 1.2501 for step in steps)


def test_it_stops_at_the_ends_of_its_range_and_says_so() -> None:
    controller = ThresholdController(settings(target=0.9))
    controller.steer(TRUNCATE)
    for _ in range(50):
        change = controller.see(0.1)
    assert controller.upper == 1.05
    assert change is not None
    assert change.why == "ess_exact 0.1 < 0.9: upper 1.05 stays, the end of its range"
    for _ in range(100):
        controller.see(1.0)
    assert controller.upper == 10.0


def test_the_mean_of_several_values_decides() -> None:
    controller = ThresholdController(settings(every_n_values=3))
    controller.steer(TRUNCATE)
    assert controller.see(0.5) is None
    assert controller.see(0.6) is None
    change = controller.see(0.7)
    assert change is not None
    assert change.mean == pytest.approx(0.6)
    assert change.after == pytest.approx(2 ** (1 / 1.25))  # one step down on log upper
    assert controller.see(math.nan) is None


def test_it_goes_on_from_its_state() -> None:
    values = [0.5, 0.99, 0.95, 0.7, 0.99, 0.99, 0.5, 0.6]
    whole = ThresholdController(settings(every_n_values=2))
    whole.steer(TRUNCATE)
    for value in values:
        whole.see(value)
    for cut in range(len(values)):
        before, after = (ThresholdController(settings(every_n_values=2)) for _ in range(2))
        before.steer(TRUNCATE)
        for value in values[:cut]:
            before.see(value)
        after.load_state_dict(before.state_dict())
        after.steer(TRUNCATE)
        for value in values[cut:]:
            after.see(value)
        assert after.state_dict() == whole.state_dict()


def test_another_correction_is_steered_from_its_own_bound() -> None:
    controller = ThresholdController(settings())
    controller.steer(TRUNCATE)
    controller.see(0.5)
    controller.steer(CorrectionConfig(level="sequence", control="truncate", upper=3.0))
    assert controller.upper == 3.0
    controller.steer(CorrectionConfig())
    assert controller.upper is None
    assert controller.see(0.5) is None


def test_a_masks_bounds_move_together_on_the_log_ratio() -> None:
    moved = with_upper(MASK, 3.0)
    assert (moved.lower, moved.upper) == (pytest.approx(1 / 3), 3.0)
    assert with_upper(TRUNCATE, 3.0) == CorrectionConfig(level="token", control="truncate", upper=3.0)


@pytest.mark.parametrize(
    ("metric", "config", "said"),
    [
        ("ess_exact", CorrectionConfig(), "no upper bound to steer"),
        ("ess_exact", MASK, "use clipped_frac"),
        ("clipped_frac", CorrectionConfig(level="token", control="truncate", upper=20.0), "outside of"),
    ],
)
def test_what_cannot_be_steered_is_refused(metric: Steered, config: CorrectionConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(metric).check(config)


@pytest.mark.parametrize(
    "changed",
    [
        {"target": 1.0},
        {"tolerance": 0.0},
        {"every_n_values": 0},
        {"min_upper": 1.0},
        {"max_upper": 1.0},
        {"max_change": 1},
    ],
)
def test_settings_out_of_range_are_refused(changed: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        settings(**changed)
