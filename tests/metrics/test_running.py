"""Running means, spreads and extremes."""

from __future__ import annotations

import doctest
import math

import pytest
import torch

from app.metrics import RunningStatistics, running


def test_the_example_of_the_docstring() -> None:
    results = doctest.testmod(running)
    assert (results.failed, results.attempted) == (0, 3)


def test_ratio_of_sums_not_mean_of_ratios() -> None:
    metric = RunningStatistics(ratios=["loss"])
    metric.update(ratios={"loss": (torch.tensor(3.0), torch.tensor(1))})
    metric.update(ratios={"loss": (1.0, 9)})
    assert metric.compute() == {"loss": 0.4}  # the mean of 3 and 1/9 would be 1.56


def test_spread_and_extremes_by_hand() -> None:
    metric = RunningStatistics(spreads=["reward"], maxima=["longest"], minima=["shortest"])
    metric.update(spreads={"reward": torch.tensor([[1.0, 2.0]])}, maxima={"longest": 4}, minima={"shortest": 4})
    metric.update(
        spreads={"reward": torch.tensor([6.0])},
        maxima={"longest": torch.tensor([2, 3])},
        minima={"shortest": torch.tensor([-2, 3])},
    )
    assert metric.compute() == {
        "reward_mean": 3.0,
        "reward_std": pytest.approx(math.sqrt(14 / 3), rel=1e-15),
        "longest": 4.0,
        "shortest": -2.0,
    }


def test_names_without_data_are_absent() -> None:
    metric = RunningStatistics(ratios=["a", "b"], spreads=["c"], maxima=["d"], minima=["e"])
    metric.update(ratios={"a": (1, 2), "b": (0, 0)}, spreads={"c": torch.empty(0)}, maxima={"d": torch.empty(0)})
    assert metric.compute() == {"a": 0.5}


def test_undeclared_names_are_refused() -> None:
    with pytest.raises(KeyError, match=r"unknown names \['count b', 'sum b'\]"):
        RunningStatistics(ratios=["a"]).update(ratios={"b": (1, 2)})


def test_many_small_numbers_keep_their_precision() -> None:
    metric = RunningStatistics(ratios=["x"])
    for _ in range(1000):
        metric.update(ratios={"x": (torch.tensor(1e-3), 1)})
    assert metric.compute()["x"] == pytest.approx(torch.tensor(1e-3).item(), rel=1e-12)
