"""Scales, ticks and axes of the plots, in user units of an SVG that is WIDTH wide."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from app.audit.report.markup import Content, Markup, join, tag
from app.audit.report.wording import number

WIDTH = 380
"""Of every plot: near a phone's width and a third of a desktop's, so that letters keep their size on both."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values to lengths."""

    low: float
    """Smallest value."""
    high: float
    """Largest value; above `low`."""
    start: float
    """Where the smallest value is."""
    end: float
    """Where the largest value is; before `start` on an axis that grows upwards."""
    log: bool = False
    """Whether equal lengths are equal ratios; then `low` is above 0."""

    def __call__(self, value: float) -> float:
        """Return the length of a value; values beyond the scale are moved to its ends."""
        inner = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(inner / self.low) / math.log(self.high / self.low)
        else:
            part = (inner - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Return at most `most` round values: multiples of 1, 2 or 5 times a power of ten, or powers of ten."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, math.ceil((last - first + 1) / most))
            return [10.0**power for power in range(first, last + 1, step)]
        rough = (self.high - self.low) / most
        decade = 10.0 ** math.floor(math.log10(rough))
        steps = (multiple * decade for multiple in (1, 2, 5, 10, 20))
        round_step = next(each for each in steps if self.high / each - self.low / each <= most - 1 + 1e-9)
        first, last = math.ceil(self.low / round_step - 1e-9), math.floor(self.high / round_step + 1e-9)
        return [index * round_step for index in range(first, last + 1)]


def figure(title: str, height: float, *content: Content) -> Markup:
    """Return the SVG; `title` is what a screen reader says in place of the picture."""
    return tag("svg", *content, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=title)


def text(x: float, y: float, content: Content, kind: str = "", anchor: str | None = None) -> Markup:
    """Return text at its baseline; `kind`: a CSS class, `anchor`: middle or end."""
    return tag("text", content, x=x, y=y, class_=kind or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> Markup:
    """Return a line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Markup:
    """Return a rectangle that shows `title` under the pointer."""
    return tag("rect", *_title(title), x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=kind)


def dot(x: float, y: float, radius: float, kind: str, title: str = "") -> Markup:
    """Return a circle that shows `title` under the pointer."""
    return tag("circle", *_title(title), cx=x, cy=y, r=radius, class_=kind)


def x_axis(scale: Scale, top: float, bottom: float, label: str, most: int = 6) -> Markup:
    """Return the grid lines, the ticks beneath and the label of a horizontal axis."""
    return join(
        (
            *(line(scale(tick), top, scale(tick), bottom) for tick in scale.ticks(most)),
            *(text(scale(tick), bottom + 14, number(tick), "tick", "middle") for tick in scale.ticks(most)),
            text((scale.start + scale.end) / 2, bottom + 31, label, "label", "middle"),
        )
    )


def y_axis(scale: Scale, left: float, right: float, label: str, most: int = 6) -> Markup:
    """Return the grid lines, the ticks beside and the label of a vertical axis."""
    middle = (scale.start + scale.end) / 2
    turned = tag(
        "text", label, x=12, y=middle, class_="label", text_anchor="middle", transform=f"rotate(-90 12 {middle:.0f})"
    )
    return join(
        (
            *(line(left, scale(tick), right, scale(tick)) for tick in scale.ticks(most)),
            *(text(left - 5, scale(tick) + 4, number(tick), "tick", "end") for tick in scale.ticks(most)),
            turned,
        )
    )


def _title(title: str) -> Iterable[Markup]:
    return [tag("title", title)] if title else []
