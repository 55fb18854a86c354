"""The distribution that tokens are drawn from: temperature and filters."""

from __future__ import annotations

import torch
from torch import Tensor

from app.types import SamplingConfig


def sampled_distribution(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return [B, V] float32 log-probabilities of the distribution that tokens are drawn from.

    `logits` [B, V] are divided by the temperature (not at 0), then filtered by min-p, top-k and top-p in vLLM's
    order; the filtered tokens get -inf and the kept ones are renormalised.
    """
    scores = logits.float()
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
    if sampling.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if sampling.top_k > 0:
        kth = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True)
        probs = ordered.softmax(-1)
        # A token stays while the mass before it is below top_p, so the likeliest always does.
        outside = probs.cumsum(-1) - probs >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return scores.log_softmax(-1)
