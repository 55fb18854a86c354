"""Advantages of a group of completions to one prompt, from their rewards alone."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]

STD_EPSILON = 1e-4
"""Added to the standard deviation, as TRL does (verl adds 1e-6)."""


def group_advantages(rewards: Tensor, group_size: int, scale: Scale, leave_one_out: bool = False) -> Tensor:
    """Reward minus the group's baseline, over a standard deviation.

    `scale="group"` is GRPO (arXiv 2402.03300), `"none"` is Dr. GRPO (arXiv 2503.20783), `"none"` with
    `leave_one_out` is RLOO (arXiv 2402.14740); `"batch"` divides by the deviation of all rewards given
    (arXiv 2508.08221), so pass those of all ranks. The standard deviation is the unbiased one (divisor n - 1) plus
    1e-4, as in TRL; it is taken before any leave-one-out baseline. A group without spread gets exactly 0.

    Args:
        rewards: [B], the rows of a group next to each other.
        group_size: G, completions per prompt; B is a multiple of it.
        scale: what to divide by.
        leave_one_out: the baseline is the mean of the *other* rewards of the group, else of all of them.

    Returns:
        [B] in the dtype of `rewards`.

    Raises:
        ValueError: an unknown scale, rows that are not whole groups, a reward that is not finite, or
            `leave_one_out` with a group of one.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(get_args(Scale))}.")
    if leave_one_out and group_size < 2:
        raise ValueError(f"leave_one_out needs a group_size of 2 or more, got {group_size}: nothing is left.")
    grouped = _grouped(rewards, group_size)
    advantages = grouped - grouped.mean(dim=1, keepdim=True)
    if leave_one_out:
        advantages = advantages * (group_size / (group_size - 1))
    if scale == "group":
        advantages = advantages / (_std(grouped, dim=1) + STD_EPSILON)
    elif scale == "batch":
        advantages = advantages / (_std(grouped.reshape(1, -1), dim=1) + STD_EPSILON)
    zero_std = zero_std_groups(rewards, group_size)[:, None]  # the mean of equal floats may be one bit off
    return advantages.masked_fill(zero_std, 0.0).reshape(-1).to(rewards.dtype)


def zero_std_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Which groups [P] have all rewards equal, and so no gradient; P = B / G.

    Raises:
        ValueError: rows that are not whole groups, or a reward that is not finite.
    """
    grouped = _grouped(rewards, group_size)
    return (grouped == grouped[:, :1]).all(dim=1)


def _grouped(rewards: Tensor, group_size: int) -> Tensor:
    """Rewards [P, G] in float64, where squares of float32 values cannot overflow."""
    if rewards.dim() != 1 or group_size < 1 or rewards.numel() % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} must be [B] with B a multiple of group_size={group_size}.")
    finite = rewards.isfinite()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(f"rewards: row {row} is {rewards[row].item()}; a reward must be a finite number.")
    return rewards.reshape(-1, group_size).double()


def _std(values: Tensor, dim: int) -> Tensor:
    """Unbiased standard deviation, keeping the dimension; 0 for fewer than two values (torch gives NaN)."""
    if values.shape[dim] < 2 or values.numel() == 0:
        return values.new_zeros(values.shape[0], 1)
    return torch.std(values, dim=dim, keepdim=True)
