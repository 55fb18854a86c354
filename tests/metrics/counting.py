"""Histograms of values at hand: what the metrics do tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from app.metrics import histogram


def count(log_ratio: Tensor) -> Tensor:
    """Counts [BINS] int64 of log-ratios in nats (any shape, no NaN), from the most negative bin up."""
    return histogram.fold(torch.bincount(histogram.raw_index(log_ratio), minlength=histogram.RAW_BINS))


def count_weights(weights: Tensor) -> Tensor:
    """Counts [WEIGHT_BINS] int64 of weights (any shape; 0, or e^-20 and more), the first of weights 0."""
    return histogram.fold_weights(
        torch.bincount(histogram.raw_weight_index(weights), minlength=histogram.RAW_WEIGHT_BINS)
    )
