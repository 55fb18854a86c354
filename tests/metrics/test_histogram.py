"""Percentiles from the histogram against exact ones, and that counts merge exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from app.metrics import histogram
from tests.metrics.counting import count, count_weights
from tests.metrics.reference import nearest_rank

SHARES = (1, 25, 50, 75, 95, 99, 100)


def samples(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(5000, generator=generator, dtype=torch.float64)
    return {
        "narrow": normal * 1e-4,
        "wide": (normal * 4).clamp(-20, 20),
        "all scales": normal.sign() * torch.exp(normal * 4).clamp(2**-29, 20),
        "shifted": normal * 0.01 + 3,
        "mostly zero": torch.where(normal > 1, normal, 0.0),
    }[name]


@pytest.mark.parametrize("name", ["narrow", "wide", "all scales", "shifted", "mostly zero"])
def test_within_one_percent(name: str) -> None:
    values = samples(name)
    counts = count(values).double()
    exact = values.tolist()
    for percent in SHARES:
        size = histogram.percentile(counts, percent / 100, absolute=True)
        assert size == pytest.approx(nearest_rank([abs(x) for x in exact], percent), rel=0.01, abs=2**-30)
        ratio = math.exp(histogram.percentile(counts, percent / 100, absolute=False))
        assert ratio == pytest.approx(math.exp(nearest_rank(exact, percent)), rel=0.01)


@pytest.mark.parametrize("value", [0.0, 2.0**-31, 2.0**-30, 0.999999999999, 1.0, 1 - 2**-24, 19.999, 20.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_edges(value: float, sign: int) -> None:
    counts = count(torch.tensor([sign * value], dtype=torch.float64)).double()
    found = histogram.percentile(counts, 0.5, absolute=False)
    assert found == pytest.approx(sign * value, rel=0.008, abs=2**-30)


def test_beyond_the_range_saturates() -> None:
    counts = count(torch.tensor([1e10, math.inf])).double()
    assert histogram.percentile(counts, 0.5, absolute=True) == pytest.approx(20, rel=0.01)


def test_counts_of_parts_add_to_the_whole() -> None:
    values = samples("all scales")
    parts = sum(count(part) for part in values.split([1, 7, 4000, 992]))
    assert torch.equal(parts, count(values))
    assert int(parts.sum()) == 5000


def test_a_tally_counts_what_one_bincount_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram.Tally, "_ENOUGH", 4)
    tally = histogram.Tally(5)
    for part in ([0, 1], [1], [4, 4], [2]):
        tally.add(torch.tensor(part, dtype=torch.int32))
    for _ in range(2):  # reading does not change it
        assert tally.counts().tolist() == [1, 2, 1, 0, 2]
    tally.add(torch.tensor([0, 0, 0, 3], dtype=torch.int32))
    assert tally.counts().tolist() == [4, 2, 1, 1, 2]


def test_limits_of_bins_are_limits_of_raw_bins() -> None:
    """Next to each limit of a bin above 1 nat, and of weights, a value and its neighbour in float32 fall apart."""
    limits = torch.arange(64, 20 * 64, dtype=torch.float32) / 64
    below = torch.nextafter(limits, torch.zeros(()))
    for values, index in ((limits, limits * 64 - 64), (below, limits * 64 - 65)):
        wanted = histogram.ZERO_BIN + 1 + 30 * 64 + index.long()
        assert torch.equal(count(values), torch.bincount(wanted, minlength=histogram.BINS))
        assert torch.equal(count(-values).flip(0), count(values))
    limits = torch.arange(1, 8 * 512 + 1, dtype=torch.float32) / 512
    below = torch.nextafter(limits, torch.zeros(()))
    for values, index in ((limits, limits * 512 + 1), (below, limits * 512)):
        wanted = torch.bincount(index.long(), minlength=histogram.WEIGHT_BINS)
        assert torch.equal(count_weights(values), wanted)


def test_every_bin_is_hit_by_its_own_centre() -> None:
    """The index and the centre are inverse to each other, so no bin is represented by a neighbour's value."""
    half = histogram.BINS // 2
    centres = [histogram._centre(i) for i in range(-half, half + 1)]
    assert torch.equal(count(torch.tensor(centres)), torch.ones(histogram.BINS, dtype=torch.int64))


def test_weights_zero_apart_and_beyond_the_range() -> None:
    weights = torch.tensor([0.0, 0.0, 1e-9, 1 / 512, 1.0, 1.001, 7.999, 8.0, 4.8e8], dtype=torch.float64)
    counts = count_weights(weights)
    filled = {int(i): int(counts[i]) for i in counts.nonzero()}
    assert filled == {0: 2, 1: 1, 2: 1, 1 + 512: 2, 4096: 1, 4097: 2}
    assert len(counts) == histogram.WEIGHT_BINS
