from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from app.maths.advantages import group_advantages, zero_std_groups

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 4.0, 6.0, 0.0])
GROUPS = [REWARDS[:4].tolist(), REWARDS[4:].tolist()]


def test_group_scale_is_grpo_with_the_unbiased_deviation() -> None:
    expected = [(r - statistics.mean(g)) / (statistics.stdev(g) + 1e-4) for g in GROUPS for r in g]
    torch.testing.assert_close(group_advantages(REWARDS, 4, "group"), torch.tensor(expected))


def test_batch_scale_divides_by_the_deviation_of_all_rewards() -> None:
    deviation = statistics.stdev(REWARDS.tolist()) + 1e-4
    expected = [(r - statistics.mean(g)) / deviation for g in GROUPS for r in g]
    torch.testing.assert_close(group_advantages(REWARDS, 4, "batch"), torch.tensor(expected))


def test_no_scale_is_dr_grpo() -> None:
    assert group_advantages(REWARDS, 4, "none").tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0, 3.0, -3.0]


def test_leave_one_out_is_rloo() -> None:
    expected = [r - (sum(g) - r) / 3 for g in GROUPS for r in g]
    torch.testing.assert_close(group_advantages(REWARDS, 4, "none", leave_one_out=True), torch.tensor(expected))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_zero_std_groups_get_exactly_zero(scale, leave_one_out) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.5], dtype=torch.float64)
    assert rewards[:3].mean() != 0.1, "rounding alone must not become an advantage"
    advantages = group_advantages(rewards, 3, scale, leave_one_out)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert (advantages[3:] != 0).tolist() == [True, True, False]
    assert zero_std_groups(rewards, 3).tolist() == [True, False]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_of_one_and_no_rows_are_defined(scale) -> None:
    assert group_advantages(torch.tensor([3.0, -1.0]), 1, scale).tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([3.0]), 1, scale).tolist() == [0.0]
    assert group_advantages(torch.zeros(0), 4, scale).shape == (0,)
    assert zero_std_groups(torch.zeros(0), 4).shape == (0,)


@example([3.4e38, 3.4e38, -3.4e38, -3.4e38], "group")  # the sums and squares of these overflow float32
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
    st.sampled_from(["group", "batch", "none"]),
)
def test_finite_rewards_never_give_nan(values, scale) -> None:
    assert not group_advantages(torch.tensor(values), 4, scale).isnan().any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((REWARDS, 3, "none"), r"rewards \(8,\) must be \[B\] with B a multiple of group_size=3"),
        ((REWARDS, 0, "none"), "group_size=0"),
        ((REWARDS, 4, "groups"), "choose one of group, batch, none"),
        ((torch.tensor([1.0, math.nan]), 2, "none"), "row 1 is nan"),
        ((REWARDS, 1, "none", True), "leave_one_out needs a group_size of 2"),
    ],
)
def test_bad_input_is_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)
