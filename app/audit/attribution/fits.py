"""Fits to what the engine sampled: the temperature of its log-probabilities, the support of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from app.audit.sides.condition import SamplingSupport
from app.audit.sides.scores import LogitStatistics

COLDEST, HOTTEST, GRID = 0.25, 2.5, 13
"""Range and number of the temperatures that are tried first, evenly spaced in the logarithm."""
PRECISION = 2e-4
"""Width of the interval in log temperature at which the search ends."""
LEAST_DIFFERENT = 10
"""Least number of different log-probabilities for a fit: to fewer values some temperature always fits."""
WORTH = 0.01
"""Share of the mean squared difference that another temperature must remove to be preferred to the configured one."""


def fit_temperature(statistics: LogitStatistics, logprobs: Tensor, configured: float) -> float:
    """Return the temperature, to 3 digits, at which the sampled logits come closest to `logprobs`.

    Closest in the mean squared difference over the sampled tokens: the best point of a grid in log temperature, 1 and
    the configured temperature, then golden-section search between its neighbours.

    Args:
        statistics: from the trainer's logits.
        logprobs: [N], nats; tokens that are not finite are left out.
        configured: returned if no other is clearly better, or too few values differ (LEAST_DIFFERENT).
    """
    target = logprobs[statistics.places].double()
    known = target.isfinite()
    target = target[known]
    if len(target.mul(1e3).round().unique()) < LEAST_DIFFERENT:
        return configured
    logits = statistics.logits[known.to(statistics.logits.device)]
    own = logits.gather(-1, statistics.ids[known].to(logits.device)[:, None]).squeeze(-1).double().cpu()

    def error(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        normaliser = (logits / temperature).logsumexp(-1).double().cpu()
        return float((own / temperature - normaliser - target).square().mean())

    grid = torch.linspace(math.log(COLDEST), math.log(HOTTEST), GRID).tolist()
    tried = {point: error(point) for point in sorted({*grid, 0.0, math.log(configured)})}
    points = list(tried)
    best = points.index(min(tried, key=tried.__getitem__))
    found = _golden_section(error, points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)])
    if error(found) >= (1 - WORTH) * tried[math.log(configured)]:
        return configured
    return round(math.exp(found), 3)


def _golden_section(error: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimiser of a function with one valley between `low` and `high` (Kiefer 1953)."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = error(left), error(right)
    while high - low > PRECISION:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = error(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = error(right)
    return (low + high) / 2


def fit_support(statistics: LogitStatistics, vocabulary: int) -> tuple[SamplingSupport, ...]:
    """Return the smallest top_k and the smallest top_p whose support holds every audited token, if they exclude any.

    top_p has 2 digits, or 3 if 2 would exclude nothing. Both go by the trainer's own probabilities.
    """
    found = []
    if (top_k := int(statistics.ranks.max())) < vocabulary:
        found.append(SamplingSupport(top_k=top_k))
    most = float(statistics.mass_before.max())
    for digits in (2, 3):
        # A token stays while the mass before it is below top_p, so the bound is strict; 1e-6 is the margin for
        # float32's error in a sum over the vocabulary.
        top_p = (math.floor((most + 1e-6) * 10**digits) + 1) / 10**digits
        if top_p < 1:
            found.append(SamplingSupport(top_p=top_p))
            break
    return tuple(found)
