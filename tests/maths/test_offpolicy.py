from __future__ import annotations

import math

import pytest
import torch

from app.maths.offpolicy import sequence_keep

MASK = torch.tensor([[True, True, False]])
NEW = torch.tensor([[-1.5, -1.25, math.nan]])
BEHAVIOUR = torch.tensor([[-1.0, -1.25, -1e10]])  # mean of behaviour - new over the two valid tokens: 0.25


@pytest.mark.parametrize(
    ("advantage", "delta", "kept"),
    [
        (-1.0, 0.2, False),
        (-1.0, 0.25, True),  # strict: equal is kept
        (0.0, 0.2, True),  # strict: an advantage of 0 is kept
        (1.0, 0.2, True),
        (-1.0, 0.3, True),
    ],
)
def test_by_hand(advantage, delta, kept) -> None:
    assert sequence_keep(NEW, BEHAVIOUR, MASK, torch.tensor([advantage]), delta).tolist() == [kept]


def test_the_direction_is_behaviour_minus_new() -> None:
    assert sequence_keep(BEHAVIOUR, NEW, MASK, torch.tensor([-1.0]), 0.2).tolist() == [True]


def test_empty_rows_are_kept_and_missing_tokens_count_as_equal() -> None:
    new = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    behaviour = torch.tensor([[math.nan, -1.0], [math.nan, -1.0]])
    mask = torch.tensor([[True, True], [False, False]])
    advantages = torch.tensor([-1.0, -1.0])
    assert sequence_keep(new, behaviour, mask, advantages, 0.4).tolist() == [False, True]  # mean(0, 1) = 0.5
    assert sequence_keep(new, behaviour, mask, advantages, 0.6).tolist() == [True, True]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"delta=-0\.1"):
        sequence_keep(NEW, BEHAVIOUR, MASK, torch.tensor([1.0]), -0.1)
    with pytest.raises(ValueError, match=r"advantages \(2,\)"):
        sequence_keep(NEW, BEHAVIOUR, MASK, torch.tensor([1.0, 1.0]), 0.1)
