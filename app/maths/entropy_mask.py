"""Training on the tokens with the highest entropy only, where the model decides between ways to go on."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def top_entropy_threshold(entropies: Tensor, quantile: float) -> Tensor:
    """The entropy from which on a token is in the `quantile` share with the highest: keep `entropy >= threshold`.

    TRL's `top_entropy_quantile` ("Beyond the 80/20 Rule", arXiv 2506.01939, share 0.2). The threshold is the
    1 + floor(quantile * (N - 1))-th largest value. TRL interpolates down to the next smaller value, and keeps the same
    tokens. So one token at least is kept, and more than the share where entropies are equal to the threshold.

    Args:
        entropies: [N] nats, of all tokens that training may see, over ranks if a share of all of them is meant.
        quantile: share of tokens to keep, above 0 and at most 1.

    Returns:
        Scalar in the dtype of `entropies`; minus infinity for N = 0.

    Raises:
        ValueError: a shape that is not [N], a share out of range, or an entropy that is NaN.
    """
    if entropies.dim() != 1:
        raise ValueError(f"entropies {tuple(entropies.shape)} must be [N], the valid tokens alone.")
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile={quantile}: the share of tokens to keep is above 0 and at most 1.")
    count = entropies.numel()
    if count == 0:
        return entropies.new_full((), -torch.inf)
    if entropies.isnan().any():
        raise ValueError("entropies hold NaN: the model's logits are not finite.")
    kept = 1 + math.floor(quantile * (count - 1) + 1e-6)  # 0.29 * 100 is 28.999999999999996
    return entropies.kthvalue(count - kept + 1).values  # torch.quantile refuses more than 2^24 values
