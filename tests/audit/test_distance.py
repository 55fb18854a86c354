"""Two scorings of the same tokens to how far they are apart."""

from __future__ import annotations

import math

import pytest
import torch

from app.audit.attribution.distance import distance


def test_equals_a_loop():
    generator = torch.Generator().manual_seed(0)
    engine = -torch.rand(50, generator=generator, dtype=torch.float64) * 5
    trainer = engine + torch.randn(50, generator=generator, dtype=torch.float64)
    found = distance(engine, trainer)
    ratios = [t - e for e, t in zip(engine.tolist(), trainer.tolist(), strict=True)]
    assert found.mean_abs == pytest.approx(sum(map(abs, ratios)) / 50, rel=1e-12)
    assert found.max_abs == max(map(abs, ratios))
    assert found.rms == pytest.approx(math.sqrt(sum(x * x for x in ratios) / 50), rel=1e-12)
    assert found.k3 == pytest.approx(sum(min(math.exp(x) - 1 - x, 10.0) for x in ratios) / 50, rel=1e-12)
    assert found.tokens == 50


def test_k3_is_clamped_and_capped_but_differences_are_not():
    found = distance(torch.tensor([-30.0, 0.0, -1.0]), torch.tensor([0.0, -30.0, -1.0]))
    assert found.max_abs == 30
    assert found.mean_abs == 20
    # e^20 - 21 is capped at 10; at -30, clamped to -20, it is e^-20 + 19 and capped too; equal values give 0
    assert found.k3 == pytest.approx(20 / 3)
    assert distance(torch.tensor([0.0]), torch.tensor([-8.0])).k3 == pytest.approx(7 + math.exp(-8))


def test_float32_scores_are_compared_in_float64():
    trainer = torch.tensor([0.1, 0.7, -0.3])
    squares = [value * value for value in trainer.tolist()]
    assert distance(torch.zeros(3), trainer).rms == pytest.approx(math.sqrt(sum(squares) / 3), rel=1e-12)


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_tokens_without_a_value_are_counted_out(hole):
    whole = distance(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    assert distance(torch.tensor([-1.0, hole, -2.0]), torch.tensor([-1.5, -1.0, -2.0])) == whole
    assert distance(torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.5, hole, -2.0])) == whole
    assert whole.tokens == 2


def test_nothing_to_compare_is_no_difference():
    found = distance(torch.tensor([math.nan]), torch.tensor([-1.0]))
    assert (found.mean_abs, found.max_abs, found.rms, found.k3, found.tokens) == (0, 0, 0, 0, 0)
    assert distance(torch.empty(0), torch.empty(0)).tokens == 0


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\).*\(1,\).*same tokens"):
        distance(torch.zeros(2), torch.zeros(1))
