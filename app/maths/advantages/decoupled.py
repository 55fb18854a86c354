"""Advantages of several reward functions, each normalised before they are added."""

from __future__ import annotations

import torch
from torch import Tensor

from app.maths.advantages.group import STD_EPSILON
from app.maths.masking import masked_max, masked_mean, masked_min, masked_sum


def decoupled_advantages(rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """GDPO (arXiv 2601.05242): (sum_f w_f z_f - mean) / std, z_f the reward of function f normalised in its group.

    z_f = (r_f - group mean) / (group std + 1e-4) over the values present; the outer mean and std (again + 1e-4) are
    those of all rows given, so pass those of all ranks. Standard deviations are unbiased (divisor n - 1). This is TRL's
    `multi_objective_aggregation="normalize_then_sum"`. A sum of rewards, normalised afterwards, would let a function
    with a large spread hide the others.

    A missing value adds 0. A group whose present values of a function are all equal gets exactly 0 from it, and
    exactly 0 if that holds for every function. A row without any value is left out of the outer mean and std, and
    gets 0.

    Args:
        rewards: [B, F], one column per function, the rows of a group next to each other; NaN where a function does
            not apply.
        weights: [F].
        group_size: G, completions per prompt; B is a multiple of it.

    Returns:
        [B] in the dtype of `rewards`.

    Raises:
        ValueError: shapes that do not fit, rows that are not whole groups, an infinite reward, or a weight that is
            not finite.
    """
    _check(rewards, weights, group_size)
    grouped = rewards.double().reshape(-1, group_size, rewards.shape[1])  # squares of float32 values may overflow
    present = ~grouped.isnan()
    spread = masked_max(grouped, present, dim=1) > masked_min(grouped, present, dim=1)
    z = _standardised(grouped, present, dim=1)
    z = torch.where(spread[:, None], z, 0.0)  # the mean of equal floats may be one bit off
    total = (z * weights.double()).sum(dim=2).reshape(-1)
    advantages = _standardised(total, present.any(dim=2).reshape(-1), dim=0)
    with_spread = spread.any(dim=1).repeat_interleave(group_size)
    return torch.where(with_spread, advantages, 0.0).to(rewards.dtype)


def _standardised(values: Tensor, present: Tensor, dim: int) -> Tensor:
    """(value - mean) / (unbiased std + 1e-4) over the present values along `dim`; 0 where absent or alone."""
    deviation = torch.where(present, values - masked_mean(values, present, dim).unsqueeze(dim), 0.0)
    degrees = (present.sum(dim, keepdim=True) - 1).clamp(min=1)
    std = (masked_sum(deviation.square(), present, dim).unsqueeze(dim) / degrees).sqrt()
    return deviation / (std + STD_EPSILON)


def _check(rewards: Tensor, weights: Tensor, group_size: int) -> None:
    if rewards.dim() != 2 or group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} must be [B, F] with B a multiple of group_size={group_size}.")
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"weights {tuple(weights.shape)} must be [F] for rewards {tuple(rewards.shape)}.")
    if not weights.isfinite().all():
        raise ValueError(f"weights {weights.tolist()} must be finite numbers.")
    if rewards.isinf().any():
        row, column = rewards.isinf().nonzero()[0].tolist()
        raise ValueError(
            f"rewards: row {row} of function {column} is {rewards[row, column].item()}; a reward must be a finite "
            f"number, or NaN where the function does not apply."
        )
