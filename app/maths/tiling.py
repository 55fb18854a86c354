"""Work on [B, T] tensors in tiles of whole rows that fit the cache, without what only longer rows pad them with.

The rows are taken from the longest to the shortest, so that rows of about one length share a tile: cut to its longest
row, a tile has hardly any padding left. Completions of an RL batch often fill half of their tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_TOKENS = 80 << 10
"""Positions of a tile on a CPU: 640 KiB as float64. Smaller ones stay in the cache, but each costs 0.3 ms of Python."""
ACCELERATOR_TILE_TOKENS = 1 << 22
"""Positions of a tile elsewhere: enough to keep a GPU busy, a modest share of its memory (32 MiB a float64 tensor)."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some rows of [B, T] tensors, and how many of their columns matter."""

    rows: Tensor
    """[b] int64: their indices."""
    width: int
    """Columns up to the last valid token of these rows."""

    def cut(self, values: Tensor) -> Tensor:
        """Return a copy [b, width] of the tile's part of `values` [B, T]; nobody else holds it."""
        return values[:, : self.width].index_select(0, self.rows)

    def paste(self, values: Tensor, target: Tensor) -> None:
        """Write `values` [b, width] to the tile's place in `target` [B, T]."""
        target[self.rows, : self.width] = values


def row_tiles(mask: Tensor) -> Iterator[Tile]:
    """Yield tiles that hold every row of `mask` [B, T] bool with a True in it once; the other rows are in none."""
    if not mask.numel():
        return
    size = TILE_TOKENS if mask.device.type == "cpu" else ACCELERATOR_TILE_TOKENS
    parts = mask.split(max(1, size // mask.shape[1]))
    widths, order = torch.cat([_last_valid(part) for part in parts]).sort(descending=True)
    lengths = widths.tolist()
    start, stop = 0, len(lengths) - lengths.count(0)
    while start < stop:
        end = min(stop, start + max(1, size // lengths[start]))
        yield Tile(rows=order[start:end], width=lengths[start])
        start = end


def _last_valid(mask: Tensor) -> Tensor:
    """Position [B] of each row's last True, counted from 1; 0 in a row without."""
    narrow = torch.int16 if mask.shape[1] < 1 << 15 else torch.int32
    return (mask * torch.arange(1, mask.shape[1] + 1, dtype=narrow, device=mask.device)).amax(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep CPU operations on the calling thread.

    A tile is too small to share out: where other processes want the cores too, waiting for the threads to meet
    after each of some hundred operations takes up to a hundred times as long as the work.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
