"""From the tensors of some rows to the two vectors that all diagnostics are read from, in one pass over tiles.

The core vector is cheap enough for every step; the detailed one adds what needs probabilities, rows, histograms and
positions. Each counts its own tokens and rows, so an interval may mix steps with and without details.

Everything is summed in float64 and in a form that does not cancel: chi-squared as expm1(2l), k3 as expm1(l) - l,
weights and ratios as their distance from 1, probabilities as their distance from 1 (most sampled tokens are near
1), and the covariance of two nearly equal probabilities through the variance of their difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.correction import Correction
from app.maths.tiling import one_thread, row_tiles
from app.metrics import core, detail
from app.metrics.core import CORE
from app.metrics.detail import DETAIL
from app.metrics.rows import Rows
from app.metrics.token_values import read_tile


@torch.no_grad()
def measure(rows: Rows, correction: Correction | None, *, detailed: bool = True) -> tuple[Tensor, Tensor]:
    """Return the vectors (core, detailed) of all `rows`; the second is that of no data unless `detailed`.

    Args:
        rows: what is measured.
        correction: what was made of the same rows. None: they were not corrected.
        detailed: whether the second vector is measured.
    """
    config = None if correction is None else correction.config
    tokens, sums, details = [], [], detail.Details(rows.mask)
    with one_thread():
        for where in row_tiles(rows.mask):
            tile = read_tile(rows, where, correction)
            tokens.append(core.token_sums(tile, config))
            sums.append(core.row_sums(tile, config))
            if detailed:
                details.add(tile)
                sums[-1] |= detail.row_sums(tile)
        if not tokens:  # no row has a valid token
            return CORE.empty(rows.mask.device), DETAIL.empty(rows.mask.device)
        by_row = {name: torch.cat([part[name] for part in sums]) for name in sums[0]}
        values = CORE.add_up(tokens) | core.row_values(by_row, config) | core.row_input_sums(rows, by_row["rows"])
        if not detailed:
            return CORE.pack(values), DETAIL.empty(rows.mask.device)
        details_values = details.values() | detail.row_values(by_row, rows.rewards)
        return CORE.pack(values), DETAIL.pack(details_values, details.counts())
