from __future__ import annotations

import math
import statistics

import pytest
import torch

from app.maths.advantages import decoupled_advantages

NAN = math.nan


def loop(rewards: list[list[float]], weights: list[float], group_size: int) -> list[float]:
    """Value by value, with the standard library's mean and stdev; rows without a value count nowhere."""
    totals: list[float | None] = []
    for row, values in enumerate(rewards):
        start = row - row % group_size
        total, any_value = 0.0, False
        for function, value in enumerate(values):
            if math.isnan(value):
                continue
            any_value = True
            group = [rewards[i][function] for i in range(start, start + group_size)]
            present = [other for other in group if not math.isnan(other)]
            deviation = statistics.stdev(present) if len(present) > 1 else 0.0
            total += weights[function] * (value - statistics.mean(present)) / (deviation + 1e-4)
        totals.append(total if any_value else None)
    scored = [total for total in totals if total is not None]
    mean, deviation = statistics.mean(scored), statistics.stdev(scored)
    return [0.0 if total is None else (total - mean) / (deviation + 1e-4) for total in totals]


COMPLETE = [[1.0, 0.2], [0.0, 0.9], [0.0, 0.4], [1.0, 0.1], [1.0, 5.0], [0.0, 5.5]]
SPARSE = [[1.0, NAN], [0.0, 0.9], [NAN, NAN], [1.0, 0.1], [1.0, NAN], [0.0, 5.5]]


@pytest.mark.parametrize("rewards", [COMPLETE, SPARSE])
@pytest.mark.parametrize("group_size", [2, 3, 6])
def test_equals_a_loop(rewards, group_size) -> None:
    weights = [1.0, 0.3]
    found = decoupled_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(weights), group_size)
    expected = torch.tensor(loop(rewards, torch.tensor(weights).tolist(), group_size), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_wide_reward_does_not_hide_a_narrow_one() -> None:
    """GDPO's point: (1, 0) and (0, 100) differ from (0, 0) alike, where a plain sum sees the second only."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 100.0], [0.0, 0.0]], dtype=torch.float64)
    found = decoupled_advantages(rewards, torch.ones(2), 4)
    assert found[0].item() == pytest.approx(found[2].item(), rel=1e-3)
    assert found[1].item() == found[3].item() < 0


def test_functions_without_spread_add_exactly_nothing() -> None:
    """0.1 + 0.1 + 0.1 divided by 3 is not 0.1: rounding alone must not become an advantage."""
    flat = torch.full((3, 1), 0.1, dtype=torch.float64)
    spread = torch.tensor([[0.0], [1.0], [0.5]], dtype=torch.float64)
    assert flat.mean() != 0.1
    both = decoupled_advantages(torch.cat([flat, spread], dim=1), torch.tensor([1e6, 1.0]), 3)
    alone = decoupled_advantages(spread, torch.ones(1), 3)
    assert torch.equal(both, alone)
    uneven = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)  # its normalised values add up to -2e-16
    two_groups = decoupled_advantages(torch.cat([flat, uneven]), torch.ones(1), 3)
    assert two_groups[:3].tolist() == [0.0, 0.0, 0.0]
    assert (two_groups[3:] != 0).all()


def test_missing_values_and_lone_rows_are_defined() -> None:
    nothing = torch.full((4, 2), NAN)
    assert decoupled_advantages(nothing, torch.ones(2), 2).tolist() == [0.0] * 4
    assert decoupled_advantages(torch.tensor([[3.0, NAN]]), torch.ones(2), 1).tolist() == [0.0]
    assert decoupled_advantages(torch.zeros(0, 2), torch.ones(2), 4).shape == (0,)
    one_of_two = torch.tensor([[3.0, 1.0], [NAN, 2.0]], dtype=torch.float64)  # a single value has no spread
    assert torch.equal(
        decoupled_advantages(one_of_two, torch.ones(2), 2),
        decoupled_advantages(one_of_two[:, 1:], torch.ones(1), 2),
    )


def test_a_row_without_a_value_changes_nobody_else() -> None:
    rewards = torch.tensor([[1.0], [0.0], [4.0], [3.0], [0.0]], dtype=torch.float64)
    with_hole = torch.cat([rewards, torch.tensor([[NAN]], dtype=torch.float64)])
    found = decoupled_advantages(with_hole, torch.ones(1), 6)
    assert found[5].item() == 0
    torch.testing.assert_close(found[:5], decoupled_advantages(rewards, torch.ones(1), 5), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4), torch.ones(1), 2), r"rewards \(4,\) must be \[B, F\]"),
        ((torch.zeros(4, 1), torch.ones(1), 3), "multiple of group_size=3"),
        ((torch.zeros(4, 2), torch.ones(3), 2), r"weights \(3,\) must be \[F\]"),
        ((torch.zeros(4, 1), torch.tensor([NAN]), 2), "must be finite numbers"),
        ((torch.tensor([[0.0, 0.0], [0.0, math.inf]]), torch.ones(2), 2), "row 1 of function 1 is inf"),
    ],
)
def test_bad_input_is_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        decoupled_advantages(*arguments)
