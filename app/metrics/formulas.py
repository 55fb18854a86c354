"""How a value is read from merged totals. Each function returns a reader: totals -> value, or None for no data.

No data means a denominator of 0: nothing was valid, or the input was not given. The key is then left out, rather
than shown as a 0 that looks like a perfect match or as a NaN that spoils a logger's plot.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from app.metrics import histogram
from app.metrics.state import Totals

Reader = Callable[[Totals], float | None]

_ROUNDING = 1e-13
"""A variance below this share of the second moment is rounding error: there is no spread."""


def mean(total: str, count: str, plus: float = 0.0) -> Reader:
    """sum / count + plus; `plus` undoes the shift of the summed values."""
    return lambda totals: plus + totals[total] / totals[count] if totals[count] else None


def maximum(name: str) -> Reader:
    """The largest value."""
    return lambda totals: totals[name] if totals[name] > -math.inf else None


def minimum(name: str) -> Reader:
    """The smallest value, kept as the maximum of -x."""
    return lambda totals: 0.0 - totals[name] if totals[name] > -math.inf else None  # -0.0 would be shown as "-0"


def std(total: str, squared: str, count: str) -> Reader:
    """Population standard deviation (divided by n); both sums may be of values shifted by one constant."""

    def read(totals: Totals) -> float | None:
        n = totals[count]
        return math.sqrt(_variance(totals[total], totals[squared], n)) if n else None

    return read


def effective_sample_size(total: str, squared: str, count: str, shift: float = 0.0) -> Reader:
    """Kish (1965): 1 / mean((w / mean w)^2) = (sum w)^2 / (n sum w^2), in (0, 1]; 0 if every weight is 0.

    `shift`: the sums are of w - shift.
    """

    def read(totals: Totals) -> float | None:
        n = totals[count]
        if not n:
            return None
        shifted_mean, shifted_square = totals[total] / n, totals[squared] / n
        mean_square = shifted_square + 2 * shift * shifted_mean + shift**2
        return (shifted_mean + shift) ** 2 / mean_square if mean_square else 0.0

    return read


def percentile(share: float, *, absolute: bool) -> Reader:
    """Percentile of |old - rollout| in nats (`absolute`), or of the ratio exp(old - rollout); within 1 %."""

    def read(totals: Totals) -> float | None:
        if not totals["tokens"]:
            return None
        value = histogram.percentile(totals.counts["log_ratio"], share, absolute=absolute)
        return value if absolute else math.exp(value)

    return read


def probability_correlation(totals: Totals) -> float | None:
    """Pearson correlation of the two probabilities, covariance as (var x + var y - var(x - y)) / 2.

    Of nearly equal x and y the difference carries all information: this form keeps 1 - r exact where the
    product moment would lose it.
    """
    n = totals["tokens"]
    if not n:
        return None
    x, y = totals["old_prob_m1"], totals["rollout_prob_m1"]
    var_x, var_y = _variance(x, totals["old_prob_m1_sq"], n), _variance(y, totals["rollout_prob_m1_sq"], n)
    var_gap = _variance(x - y, totals["prob_diff_sq"], n)
    return (var_x + var_y - var_gap) / (2 * math.sqrt(var_x * var_y)) if var_x and var_y else None


def reward_correlation(totals: Totals) -> float | None:
    """Pearson correlation of a row's mean log-ratio with its reward, from plain float64 moments.

    Their relative error is about 1e-16 (mean / std)^2, less than what float32 rewards themselves have lost.
    """
    n = totals["reward_units"]
    if not n:
        return None
    var_l = _variance(totals["row_l"], totals["row_l_sq"], n)
    var_reward = _variance(totals["reward"], totals["reward_sq"], n)
    covariance = totals["row_l_reward"] / n - totals["row_l"] / n * totals["reward"] / n
    return covariance / math.sqrt(var_l * var_reward) if var_l and var_reward else None


def _variance(total: float, squared: float, n: float) -> float:
    """Mean square minus squared mean; 0 where the difference is only rounding error."""
    variance = squared / n - (total / n) ** 2
    return variance if variance > _ROUNDING * squared / n else 0.0
