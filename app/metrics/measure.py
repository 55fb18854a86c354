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

from app.maths.correction import CorrectionConfig
from app.metrics.core import CORE, core_vector
from app.metrics.detail import DETAIL, detail_vector
from app.metrics.rows import Rows, one_thread
from app.metrics.tile import read_tile


@torch.no_grad()
def measure(rows: Rows, config: CorrectionConfig | None, *, detailed: bool = True) -> tuple[Tensor, Tensor]:
    """Return the vectors (core, detailed) of all `rows`; the second is that of no data unless `detailed`."""
    core, detail = CORE.empty(rows.mask.device), DETAIL.empty(rows.mask.device)
    with one_thread():
        for piece in rows.tiles():
            tile = read_tile(piece, config)
            core = CORE.merge(torch.stack([core, core_vector(tile, config)]))
            if detailed:
                detail = DETAIL.merge(torch.stack([detail, detail_vector(tile)]))
    return core, detail
