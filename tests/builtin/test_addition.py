import pytest

from app.builtin.addition import careless_sum, carries, pairs, rows
from app.errors import DataError


def test_splits_share_no_pair_in_either_order():
    parts = [{frozenset(pair) for pair in pairs(part)} for part in ("train", "validation", "warm_up_stop")]
    assert not parts[0] & parts[1]
    assert not parts[0] & parts[2]
    assert not parts[1] & parts[2]


def test_every_pair_that_carries_is_in_one_split():
    found = sum(len(pairs(part)) for part in ("train", "validation", "warm_up_stop"))
    # by counting: ones that carry 45 of 100, else (55) tens 1..9 that carry 45 of 81
    assert found == 81 * 45 + 45 * 55


def test_rows_are_right_and_unique():
    data = rows("validation")
    assert len({row["id"] for row in data}) == len(data)
    for row in data:
        left, right = map(int, row["id"].split("+"))
        assert row["answer"] == str(left + right)
        assert row["prompt"] == [{"role": "user", "content": f"{left}+{right}="}]


@pytest.mark.parametrize(
    ("left", "right", "careless", "carrying"),
    [(37, 85, 112, True), (12, 34, 46, False), (50, 60, 110, True), (19, 11, 20, True), (99, 99, 188, True)],
)
def test_the_careless_teacher_forgets_the_carry_from_the_ones(left, right, careless, carrying):
    assert careless_sum(left, right) == careless
    assert carries(left, right) == carrying


def test_an_unknown_split_is_named():
    with pytest.raises(DataError, match="'tset'; it is one of train, validation"):
        rows("tset")
