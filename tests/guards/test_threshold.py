"""The controller in a closed loop with log-ratios drawn by hand, float64; weights and shares are computed here."""

import itertools
import math

import pytest
import torch

from app.guards.run_control import with_upper
from app.guards.threshold import ThresholdConfig, ThresholdController
from app.maths.correction import CorrectionConfig, preset

TRUNCATE = CorrectionConfig(level="token", control="truncate", upper=2.0)
MASK = CorrectionConfig(level="token", control="mask", lower=0.5, upper=2.0)


def config(metric="ess_exact", target=0.95, **settings):
    defaults = {"tolerance": 0.25, "every_n_values": 5, "min_upper": 1.02, "max_upper": 20.0, "max_change": 1.25}
    return ThresholdConfig(metric=metric, target=target, **{**defaults, **settings})


def log_ratios(sigma: float, seed: int, tokens: int = 4000) -> torch.Tensor:
    """l ~ N(-sigma²/2, sigma²): the mean ratio is 1, as under the rollout policy."""
    noise = torch.randn(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return sigma * noise - sigma**2 / 2


def heavy(scale: float, seed: int) -> torch.Tensor:
    """Mostly small differences, one token in 50 with ten times as much."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(4000, generator=generator, dtype=torch.float64)
    wide = torch.rand(4000, generator=generator, dtype=torch.float64) < 0.02
    return scale * torch.where(wide, 10 * noise, noise)


def effective(weights: torch.Tensor) -> float:
    """Kish: (sum w)² / (n sum w²)."""
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


def weights(log_ratio: torch.Tensor, bounds: CorrectionConfig) -> torch.Tensor:
    ratio = log_ratio.exp()
    if bounds.control == "truncate":
        return ratio.clamp(max=bounds.upper)
    return torch.where((ratio >= (bounds.lower or 0.0)) & (ratio <= bounds.upper), ratio, 0.0)


def clipped(log_ratio: torch.Tensor, bounds: CorrectionConfig) -> float:
    ratio = log_ratio.exp()
    if bounds.control == "truncate":
        return float((ratio > bounds.upper).double().mean())
    return float((weights(log_ratio, bounds) == 0).double().mean())


def run(controller, of, draw, steps=600):
    """Upper bound and metric at every step of a closed loop."""
    controller.steer(of)
    uppers, values = [], []
    for step in range(steps):
        bounds = with_upper(of, controller.upper)
        drawn = draw(step)
        value = effective(weights(drawn, bounds)) if controller.config.metric == "ess_exact" else clipped(drawn, bounds)
        uppers.append(controller.upper)
        values.append(value)
        controller.see(value)
    return uppers, values


CASES = {
    "ess, gaussian": (TRUNCATE, "ess_exact", 0.75, lambda step: log_ratios(0.8, step)),
    "ess, heavy tails": (TRUNCATE, "ess_exact", 0.95, lambda step: heavy(0.15, step)),
    "ess, small mismatch": (TRUNCATE, "ess_exact", 0.996, lambda step: log_ratios(0.08, step)),
    "clipped share of truncation": (TRUNCATE, "clipped_frac", 0.02, lambda step: log_ratios(0.5, step)),
    "clipped share, small mismatch": (TRUNCATE, "clipped_frac", 0.05, lambda step: log_ratios(0.05, step)),
    "clipped share of a mask": (MASK, "clipped_frac", 0.05, lambda step: log_ratios(0.6, step)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_reaches_the_target_stays_in_range_and_comes_to_rest(case):
    of, metric, target, draw = case
    controller = ThresholdController(config(metric, target))
    uppers, values = run(controller, of, draw)
    low, high = controller.config.band
    settled = values[-200:]
    noise = torch.tensor(settled).std().item()
    mean = sum(settled) / len(settled)
    assert low - noise <= mean <= high + noise
    assert abs(values[0] - mean) > 2 * noise  # there was something to do
    assert all(1.02 <= upper <= 20.0 for upper in uppers)
    logs = [math.log(upper) for upper in uppers]
    changes = [b / a for a, b in itertools.pairwise(logs) if a != b]
    assert all(1 / 1.25 - 1e-9 <= change <= 1.25 + 1e-9 for change in changes)
    swing = max(logs[-200:]) / min(logs[-200:])
    assert swing <= 1.25  # at rest it moves less than one large step


def test_it_follows_a_mismatch_that_grows():
    controller = ThresholdController(config("ess_exact", 0.88))
    uppers, values = run(controller, TRUNCATE, lambda step: log_ratios(0.2 if step < 300 else 0.5, step))
    assert uppers[299] > 2.0 > uppers[-1]
    assert values[301] < 0.85
    assert 0.88 <= sum(values[-100:]) / 100 <= 0.91


@pytest.mark.parametrize(
    ("sigma", "end"), [(0.01, 20.0), (3.0, 1.02)], ids=["nothing to limit", "beyond what a bound can do"]
)
def test_an_unreachable_target_ends_at_the_end_of_the_range_and_says_so(sigma, end):
    controller = ThresholdController(config("ess_exact", 0.999))
    uppers, _ = run(controller, TRUNCATE, lambda step: log_ratios(sigma, step), steps=300)
    assert uppers[-1] == end
    (change,) = [found for found in (controller.see(0.5 if end < 2 else 1.0) for _ in range(5)) if found]
    assert change.why.endswith("stays, the end of its range")


def test_effective_samples_fall_as_the_bound_of_a_truncation_rises():
    for draw in (log_ratios(0.05, 1), log_ratios(0.5, 1), log_ratios(2.0, 1), heavy(0.2, 1)):
        uppers = torch.linspace(1.001, 20.0, 400, dtype=torch.float64).tolist()
        found = [effective(weights(draw, with_upper(TRUNCATE, upper))) for upper in uppers]
        assert all(b <= a + 1e-12 for a, b in itertools.pairwise(found))
        assert found[-1] < found[0]


def test_effective_samples_of_a_mask_neither_rise_nor_fall_and_are_refused():
    draw = log_ratios(1.5, 1)
    tight, middle, loose = (effective(weights(draw, with_upper(MASK, upper))) for upper in (1.05, 6.0, 400.0))
    assert middle > tight
    assert middle > loose
    with pytest.raises(ValueError, match="no direction to steer in; use clipped_frac"):
        config("ess_exact").check(MASK)


def test_the_clipped_share_falls_as_any_bound_rises():
    for of in (TRUNCATE, MASK, CorrectionConfig(level="token", control="mask", upper=2.0)):
        for draw in (log_ratios(0.5, 2), heavy(0.2, 2)):
            shares = [clipped(draw, with_upper(of, upper)) for upper in (1.01, 1.1, 1.5, 2.0, 4.0, 10.0)]
            assert shares == sorted(shares, reverse=True)
            assert shares[0] > shares[-1]


def test_the_bounds_of_a_mask_move_together():
    moved = with_upper(MASK, 4.0)
    assert (moved.lower, moved.upper) == (pytest.approx(0.25), 4.0)
    icepop = preset("verl/token_icepop")  # [0.5, 5]
    moved = with_upper(icepop, 25.0)
    assert moved.lower == pytest.approx(0.25)
    with_floor = CorrectionConfig(level="token", control="truncate", lower=0.1, upper=2.0)
    assert with_upper(with_floor, 3.0).lower == 0.1  # a floor of a truncation has another purpose


def test_one_change_by_hand():
    """The mean of 0.8, 0.82, 0.84 is below 0.9: log 2 becomes log 2 / 1.25; the next one the other way half as far."""
    controller = ThresholdController(config("ess_exact", 0.9, every_n_values=3))
    controller.steer(TRUNCATE)
    assert controller.see(0.80) is None
    assert controller.see(math.nan) is None  # not measured
    assert controller.see(0.82) is None
    change = controller.see(0.84)
    assert change.mean == pytest.approx(0.82)
    assert change.before == 2.0
    assert change.after == controller.upper == pytest.approx(2 ** (1 / 1.25))
    assert change.why == "ess_exact 0.82 < 0.9: upper 2 -> 1.741"
    assert [controller.see(0.91) for _ in range(3)] == [None] * 3  # in the band [0.9, 0.925]
    changes = [controller.see(0.95) for _ in range(3)]
    assert changes[-1].after == pytest.approx(2 ** (1 / 1.25 * 1.25**0.5))
    assert "> 0.925: upper 1.741 -> " in changes[-1].why


@pytest.mark.parametrize("cut", [1, 7, 10, 23, 60])
def test_a_controller_that_goes_on_equals_one_that_was_not_interrupted(cut, tmp_path):
    straight, first, second = (ThresholdController(config("ess_exact", 0.9)) for _ in range(3))
    expected, _ = run(straight, TRUNCATE, lambda step: log_ratios(0.8, step), steps=100)
    run(first, TRUNCATE, lambda step: log_ratios(0.8, step), steps=cut)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    found, _ = run(second, TRUNCATE, lambda step: log_ratios(0.8, step + cut), steps=100 - cut)
    assert found == expected[cut:]


def test_another_correction_is_steered_from_where_it_is_configured():
    controller = ThresholdController(config("clipped_frac", 0.05))
    run(controller, TRUNCATE, lambda step: log_ratios(0.2, step), steps=50)
    assert controller.upper < 2.0
    controller.steer(CorrectionConfig())  # nothing to steer
    assert controller.upper is None
    assert controller.see(0.5) is None
    controller.steer(MASK)
    assert controller.upper == 2.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": 1.0}, "adaptive_threshold.target=1.0"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"every_n_values": 0}, "every_n_values=0"),
        ({"min_upper": 1.0}, "min_upper=1.0"),
        ({"max_upper": 1.01}, "max_upper=1.01"),
        ({"max_change": 1.0}, "max_change=1.0"),
    ],
)
def test_settings_are_checked(settings, said):
    with pytest.raises(ValueError, match=said):
        config(**settings)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (CorrectionConfig(), "no upper bound to steer"),
        (CorrectionConfig(level="token", control="mask", lower=0.5), "no upper bound to steer"),
        (preset("nemo/seq_mask_tis"), "model.correction.upper=1.002 is outside of"),
    ],
)
def test_a_correction_that_cannot_be_steered_is_refused(of, said):
    with pytest.raises(ValueError, match=said):
        config("clipped_frac").check(of)
    config("clipped_frac").check(MASK)
    config("ess_exact").check(TRUNCATE)
