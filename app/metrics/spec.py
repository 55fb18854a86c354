"""What a logged key means: the carrier that tables, documentation and dashboard share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "nats", "1", "perplexity", "ratio", "probability", "fraction", "versions",
    "reward", "rows", "tokens", "seconds", "tokens per second", "loss", "norm",
    "gigabytes per second", "megabytes",
]  # fmt: skip
Direction = Literal["to 0", "to 1", "up", "level"]
Group = Literal["mismatch", "correction", "dropped data", "policy", "reward", "time"]
When = Literal["every step", "detailed", "rollout", "report", "sync", "canary", "validation"]


@dataclass(frozen=True, kw_only=True)
class Range:
    """A closed range of values, open-ended where a bound is None."""

    low: float | None = None
    """Least value of the range. None: no lower bound."""
    high: float | None = None
    """Largest value of the range. None: no upper bound."""

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is None:
            return f"≤ {self.high:g}" if self.high else "0"  # no key with this range is ever below 0
        return f"≥ {self.low:g}" if self.high is None else f"{self.low:g} … {self.high:g}"

    def outside(self) -> str:
        """Where a value is beyond the range, in words."""
        low = "" if self.low is None else f"< {self.low:g}"
        high = "" if self.high is None else f"> {self.high:g}"
        return " or ".join(bound for bound in (low, high) if bound)


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """One logged key, or a family of them where the key has a `<placeholder>`."""

    key: str
    """The tag; in `app.metrics.table` without the prefix."""
    definition: str
    """What the value is, in one phrase."""
    unit: Unit
    """Of the value; "1" is a pure number."""
    direction: Direction
    """What is better: "to 0" and "to 1" for a match, "up"; "level": no value is better as such."""
    denominator: str
    """What is counted in the mean; "-" for an extreme."""
    group: Group
    """Section of the dashboard."""
    when: When = "every step"
    """In which steps it is measured; "detailed" ones come every `every_n_steps`."""
    healthy: Range | None = None
    """Where it should be. None: depends on the run."""
    tolerable: Range | None = None
    """Outside of it something is broken: raise an alarm. None: no such limit is known."""
