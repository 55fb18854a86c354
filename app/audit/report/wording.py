"""Shared by all reports of an audit: number formats, and the wording of causes and remedies."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from app.audit.attribution import attribution
from app.audit.types import Audit, Distance, FactorResult, Gate, Round
from app.metrics.spec import KeyInfo
from app.metrics.table import DOCUMENTED, PREFIX

NOTHING = "–"
"""Shown in place of a missing value."""
_VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_COMMENT = re.compile(r"(?:^|\s)(#.*)")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def number(value: float | None) -> str:
    """Return three significant digits, e.g. 0.0311, 3.1e-7, 2048; `–` for None."""
    if value is None:
        return NOTHING
    if math.isfinite(value) and 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    if math.isfinite(value) and 0 < abs(value) < 1e-3:
        mantissa, power = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    """Return a share in per cent; `–` for None, NaN and infinity."""
    if share is None or not math.isfinite(share):
        return NOTHING
    return f"{round(100 * share)} %"


def explained(share: float) -> str:
    """Return a factor's share in per cent; `worse` where the change more than doubles the mean square."""
    return "worse" if share < -1 else percent(share)


def visible(text: str, keep: str = "") -> str:
    """Return the text with every character written out that a terminal or a page would interpret.

    Control characters, invisible ones, those that change the direction of writing, and halves of surrogate pairs become
    `\\x1b`, `\\u202e`; line breaks and tabs become one sign. Otherwise the text of a token could erase the screen.

    Args:
        text: the text of a token, a path or a setting.
        keep: characters to leave as they are, e.g. line breaks.
    """
    return "".join(char if char in keep else _shown(char) for char in text)


def _shown(char: str) -> str:
    if char in _VISIBLE:
        return _VISIBLE[char]
    if unicodedata.category(char) not in _HIDDEN:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters, cut in the middle."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return text[: most - 1 - tail] + "…" + text[len(text) - tail :]


def causes(audit: Audit) -> tuple[FactorResult, ...]:
    """Return the causes that the attribution found, in the order in which they were removed."""
    return attribution.causes(audit.rounds, audit.floor)


def blame(audit: Audit) -> list[tuple[FactorResult, str]]:
    """Return each cause with its part of the whole mismatch: `98 % of it`, then `another 2 % of it`."""
    found = causes(audit)
    parts = attribution.shares_of_whole(found, audit.rounds, audit.floor)
    return [
        (factor, f"{'another ' if i else ''}{percent(part)} of it")
        for i, (factor, part) in enumerate(zip(found, parts, strict=True))
    ]


def cured(audit: Audit) -> Distance | None:
    """Return the mismatch that is left with all causes removed; None without a cause."""
    blamed = causes(audit)
    return blamed[-1].left if blamed else None


def remedy(blamed: Sequence[FactorResult]) -> str:
    """Return one YAML document with the remedies for all causes; empty without a cause.

    Several remedies with keys are merged, since a repeated key would overwrite its first value; where two set the same
    key the later cause's value wins. Comments are kept, above the keys.
    """
    parsed = [yaml.safe_load(factor.remedy) for factor in blamed]
    if sum(isinstance(keys, dict) for keys in parsed) < 2:
        return "\n".join(factor.remedy.strip() for factor in blamed)
    lines = [comment for factor in blamed for comment in _COMMENT.findall(factor.remedy)]
    merged: dict[str, object] = {}
    for keys in parsed:
        merged = _merge(merged, keys) if isinstance(keys, dict) else merged
    return "\n".join([*lines, yaml.safe_dump(merged, sort_keys=False).strip()])


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def times_the_floor(audit: Audit) -> float | None:
    """Return the root mean square difference divided by the noise floor's; None if that is 0 or unknown."""
    ratio = audit.comparison.distance.rms / audit.floor.rms if audit.floor.rms > 0 else math.nan
    return ratio if math.isfinite(ratio) else None


def gate_line(gate: Gate) -> str:
    """Return value and bound of a gate, e.g. "0.0232 > 0.001"."""
    if gate.value is None:
        return f"not measured, at most {number(gate.bound)} is allowed"
    return f"{number(gate.value)} {'≤' if gate.passed else '>'} {number(gate.bound)}"


def round_title(index: int, round_: Round, audit: Audit) -> str:
    """Return the title of a round, e.g. "Round 2, without key-value cache dtype"."""
    titles = {factor.key: factor.title for each in audit.rounds for factor in each.factors}
    without = ", ".join(titles.get(key, key) for key in round_.taken_away)
    return f"Round {index}, " + (f"without {without}" if without else "as configured")


@dataclass(frozen=True, kw_only=True)
class ReportedMetric:
    """A measured diagnostic with its documentation."""

    key: str
    """Key of the metric, without its prefix."""
    value: float
    """Value measured in the audit."""
    info: KeyInfo | None
    """Documentation of the metric; None: unknown metric."""

    @property
    def state(self) -> Literal["", "healthy", "outside", "alarm"]:
        """Where the value lies in its ranges; empty without a value or a range."""
        if self.info is None or self.info.healthy is None or math.isnan(self.value):
            return ""
        if self.info.tolerable is not None and self.value not in self.info.tolerable:
            return "alarm"
        return "healthy" if self.value in self.info.healthy else "outside"


def reported_metrics(metrics: Mapping[str, float]) -> Iterator[ReportedMetric]:
    """Yield every diagnostic in the order of the table of metrics; members of a family and unknown keys come last."""
    infos = {info.key: info for info in DOCUMENTED}
    order = {key: place for place, key in enumerate(infos)}
    values = {key.removeprefix(PREFIX): value for key, value in metrics.items()}
    for key in sorted(values, key=lambda key: order.get(key, len(order))):
        family = (info for name, info in infos.items() if "<" in name and key.startswith(name.split("<")[0]))
        yield ReportedMetric(key=key, value=values[key], info=infos.get(key) or next(family, None))
