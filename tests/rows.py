"""Rows and batches as tests look at them."""

from __future__ import annotations

from app.types import TrainBatch


def prompt_lengths(batch: TrainBatch) -> tuple[int, ...]:
    """Tokens before the first sampled one of each row."""
    return tuple(batch.positions[:, 0].tolist())
