"""Importance ratios train / rollout at the level of tokens, products and geometric means."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from app.maths.divergence import LOG_RATIO_BOUND, kl_sampler_target_k2, kl_sampler_target_k3


class Ratios:
    """The ratios of some rows, and what the rules need beside them: [B, T] of tokens, [B, 1] of rows.

    What stands at masked positions is the value of l = 0, or that of the row: select afterwards.

    Args:
        log_ratio: [B, T] l = old - rollout, already 0 where masked or missing; may be infinite at valid tokens.
        mask: [B, T] bool, valid tokens. A missing token counts in a row's length, with l = 0.
        within_bound: every |l| is at most LOG_RATIO_BOUND, which the caller has seen: nothing need be clamped.
        shift: 1: every ratio is given less 1, as expm1(l), whose sums do not cancel; bounds are to be shifted too.
    """

    def __init__(
        self, log_ratio: Tensor, mask: Tensor, *, within_bound: bool = False, shift: Literal[0, 1] = 0
    ) -> None:
        self.log_ratio = log_ratio
        self.clamped = log_ratio if within_bound else log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        self.mask = mask
        self.shift = shift
        self._exp = torch.expm1 if shift else torch.exp

    @cached_property
    def token(self) -> Tensor:
        """[B, T] exp(l), l clamped."""
        return self._exp(self.clamped)

    @cached_property
    def sequence(self) -> Tensor:
        """[B, 1] exp of the row's sum of l, itself clamped (verl's `sequence`, TRL's `sequence_mask`)."""
        total = self.log_ratio.sum(dim=1, keepdim=True).nan_to_num(nan=0.0)  # +inf and -inf in one row cancel
        return self._exp(total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))

    @cached_property
    def geometric(self) -> Tensor:
        """[B, 1] exp of the row's mean of the clamped l (GSPO, arXiv 2507.18071; ms-swift's sequence level)."""
        return self._exp(self.row_mean(self.clamped))

    @cached_property
    def k2(self) -> Tensor:
        """[B, T] of the clamped l; 0 where masked."""
        return kl_sampler_target_k2(self.clamped)

    @cached_property
    def k3(self) -> Tensor:
        """[B, T] of the clamped l, sharing the expm1 of shifted ratios; 0 where masked."""
        return self.token - self.clamped if self.shift else kl_sampler_target_k3(self.clamped)

    @cached_property
    def lengths(self) -> Tensor:
        """[B, 1] int32: valid tokens of each row."""
        return self.mask.sum(dim=1, keepdim=True, dtype=torch.int32)

    def at(self, level: str) -> Tensor:
        """The ratio at `token`, `sequence` or `geometric` level."""
        if level == "token":
            return self.token
        return self.sequence if level == "sequence" else self.geometric

    def row_mean(self, values: Tensor) -> Tensor:
        """[B, 1] mean over valid tokens of `values` [B, T], which are 0 where masked; 0 of an empty row."""
        return values.sum(dim=1, keepdim=True) / self.lengths.clamp(min=1)
