"""Tiles: every row with a valid token once, cut to what is valid."""

from __future__ import annotations

import pytest
import torch

from app.maths import tiling
from app.maths.tiling import one_thread, row_tiles


def test_rows_by_length_and_none_without_a_valid_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE_TOKENS", 6)
    mask = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 1, 0]]).bool()
    tiles = list(row_tiles(mask))
    assert [(sorted(tile.rows.tolist()), tile.width) for tile in tiles] == [([2, 4], 3), ([0, 3], 2)]
    target = torch.zeros(5, 4, dtype=torch.int64)
    values = torch.arange(20).view(5, 4)
    for tile in tiles:
        tile.paste(tile.cut(values), target)
    assert torch.equal(target[mask], values[mask])
    assert not target[1].any()


def test_a_row_longer_than_a_tile_is_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE_TOKENS", 2)
    assert [tile.width for tile in row_tiles(torch.ones(2, 5, dtype=torch.bool))] == [5, 5]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 4)])
def test_nothing_valid_gives_no_tile(shape: tuple[int, int]) -> None:
    assert list(row_tiles(torch.zeros(shape, dtype=torch.bool))) == []


def test_positions_beyond_16_bits() -> None:
    mask = torch.zeros(2, 40_000, dtype=torch.bool)
    mask[1, 39_999] = mask[0, 32_768] = True
    (tile,) = row_tiles(mask)
    assert tile.width == 40_000
    assert tile.rows.tolist() == [1, 0]


def test_number_of_threads_is_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        with pytest.raises(ZeroDivisionError), one_thread():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
