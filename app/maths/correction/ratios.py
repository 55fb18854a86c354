"""Importance ratios train / rollout at the level of tokens, products and geometric means."""

from __future__ import annotations

from torch import Tensor

from app.maths.divergence import LOG_RATIO_BOUND
from app.maths.masking import masked_mean


class Ratios:
    """The ratios of one batch, each level [B, T] with a row's value at all its positions.

    Args:
        log_ratio: [B, T] l = old - rollout, already 0 where masked or missing; may be infinite at valid tokens.
        mask: [B, T] bool, valid tokens. A missing token counts in a row's length, with l = 0.
    """

    def __init__(self, log_ratio: Tensor, mask: Tensor) -> None:
        self.log_ratio = log_ratio
        self.clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        self.mask = mask

    def token(self) -> Tensor:
        """exp(l), l clamped."""
        return self.clamped.exp()

    def sequence(self) -> Tensor:
        """exp of the row's sum of l, the sum clamped and not its terms (verl's `sequence`, TRL's `sequence_mask`)."""
        total = self.log_ratio.sum(dim=1, keepdim=True).nan_to_num(nan=0.0)  # +inf and -inf in one row cancel
        return total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().expand_as(self.clamped)

    def geometric(self) -> Tensor:
        """exp of the row's mean of the clamped l (GSPO, arXiv 2507.18071; ms-swift's sequence level); 1 if empty."""
        return masked_mean(self.clamped, self.mask, dim=1).exp()[:, None].expand_as(self.clamped)

    def at(self, level: str) -> Tensor:
        """The ratio at `token`, `sequence` or `geometric` level."""
        by_level = {"token": self.token, "sequence": self.sequence, "geometric": self.geometric}
        return by_level[level]()
