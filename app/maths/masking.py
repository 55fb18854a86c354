"""Sums, means and extremes over the True positions of a boolean mask.

Values are selected with `where` before any arithmetic: a product with the mask would turn NaN or inf at a masked
position into NaN (0 * inf), in the value or in the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

Dim = int | tuple[int, ...] | None


def select(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where `mask` is True, `fill` elsewhere; no gradient reaches a masked position.

    Raises:
        ValueError: if the mask is not boolean, or the shapes do not broadcast to that of `values`.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}.")
    if torch.broadcast_shapes(values.shape, mask.shape) != values.shape:
        raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to values {tuple(values.shape)}.")
    return torch.where(mask, values, values.new_full((), fill))


def masked_sum(values: Tensor, mask: Tensor, dim: Dim = None) -> Tensor:
    """Sum over `dim` (None: all dimensions); 0 where the mask is empty."""
    selected = select(values, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: Dim = None, empty: float = 0.0) -> Tensor:
    """Mean over `dim` (None: all dimensions); `empty` where the mask is empty."""
    total = masked_sum(values, mask, dim)
    counted = mask.expand(values.shape)
    count = counted.sum() if dim is None else counted.sum(dim)
    return torch.where(count > 0, total / count.clamp(min=1), total.new_full((), empty))


def masked_max(values: Tensor, mask: Tensor, dim: Dim = None, empty: float = 0.0) -> Tensor:
    """Largest value over `dim` (None: all dimensions); `empty` where the mask is empty."""
    selected = select(values, mask, fill=-torch.inf)
    dims = tuple(range(values.dim())) if dim is None else dim
    if values.numel() == 0:  # amax refuses a dimension of size 0, which a batch without tokens has
        return masked_sum(values, mask, dim) + empty
    counted = mask.expand(values.shape).any() if dim is None else _any(mask.expand(values.shape), dim)
    return torch.where(counted, selected.amax(dims), values.new_full((), empty))


def masked_min(values: Tensor, mask: Tensor, dim: Dim = None, empty: float = 0.0) -> Tensor:
    """Smallest value over `dim` (None: all dimensions); `empty` where the mask is empty."""
    return -masked_max(-values, mask, dim, -empty)


def _any(mask: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return mask.sum(dim) > 0
