"""Bounds that fail an audit, for continuous integration: `--fail-above k3_kl=1e-3,top1_disagreement=0.02`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from app.audit.types import Comparison, Gate
from app.errors import LockstepError
from app.metrics import position, table

TOP1_DISAGREEMENT = "top1_disagreement"
"""Key of 1 - `Comparison.top1_agreement`, the only one that is not in `app.metrics.table`."""


def parse(text: str) -> dict[str, float]:
    """Return the largest passing value by key, from `key=number,key=number,...`.

    Keys are those of `app.metrics.table` without the prefix, and `top1_disagreement`.

    Raises:
        LockstepError: one line, for a key that does not exist, comes twice or has no value that is too large, and for
            a value that is not a finite number.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        key, _, number = (word.strip() for word in part.partition("="))
        _check_key(key, part)
        if key in bounds:
            raise LockstepError(f"--fail-above: {key} is given twice; keep one bound")
        try:
            bounds[key] = float(number)
        except ValueError:
            bounds[key] = math.nan
        if not math.isfinite(bounds[key]):
            raise LockstepError(f"--fail-above {part.strip()}: the bound must be a number, as in {key}=0.001")
    return bounds


def gates(bounds: Mapping[str, float], comparison: Comparison) -> tuple[Gate, ...]:
    """Return each bound with the measured value, in the order of `bounds`. What was not measured does not pass.

    Where 0 is best the absolute value counts: a `kl` of -0.2 is as bad as one of 0.2.
    """
    specs = {spec.key: spec for spec in table.SPECS}

    def value(key: str) -> float | None:
        if key == TOP1_DISAGREEMENT:
            return None if comparison.top1_agreement is None else 1 - comparison.top1_agreement
        found = comparison.metrics.get(table.PREFIX + key)
        if found is None or math.isnan(found):
            return None
        return abs(found) if key in specs and specs[key].direction == "to 0" else found

    return tuple(Gate(key=key, bound=bound, value=value(key)) for key, bound in bounds.items())


def _check_key(key: str, part: str) -> None:
    """Raise LockstepError for a key that is unknown, or for which no bound from above makes sense."""
    if not key:
        raise LockstepError(
            f"--fail-above: {part.strip()!r} has no key; write it as k3_kl=0.001,logprob_abs_diff_max=1"
        )
    specs = {spec.key: spec for spec in table.SPECS}
    by_position = [f"abs_diff_at_position/{start:06d}" for start in position.STARTS]
    known = [*specs, *by_position, TOP1_DISAGREEMENT]
    if key not in known:
        begun = [name for name in known if name.startswith(key)][:4]
        near = begun or difflib.get_close_matches(key, known) or ["k3_kl", "logprob_abs_diff_max", TOP1_DISAGREEMENT]
        raise LockstepError(f"--fail-above {key}: there is no such metric; did you mean {' or '.join(near)}?")
    healthy = specs[key].healthy if key in specs else None
    if healthy is not None and healthy.high is None:
        raise LockstepError(f"--fail-above {key}: healthy is {healthy}, a larger value is better; bound k3_kl instead")
