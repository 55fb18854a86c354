"""The plots of an audit: one function each returns an SVG, or nothing without data; then scales, axes and marks.

Lengths are in user units of an SVG that is WIDTH wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from app.audit.report.markup import Content, Markup, join, tag
from app.audit.report.wording import cured, explained, number, percent, shorten
from app.audit.types import Audit, Bin, Distance, FactorResult, Round, WorstToken

Plot = Markup | None
WIDTH = 380
"""Width of every plot: near a phone's width and a third of a desktop's, so that letters keep their size on both."""
LEFT, RIGHT = 48.0, WIDTH - 14.0
"""Ends of the drawing area beside a vertical axis."""
ROW, LANE = 34.0, 17.0
"""Height of a row with words above its mark, and the offset in the row at which the mark's lane begins."""


def scatter(points: Sequence[tuple[float, float]], worst: Sequence[WorstToken]) -> Plot:
    """Return engine (across) against trainer (up) log-probabilities, the diagonal, and the worst tokens as rings."""
    finite = [pair for pair in points if all(map(math.isfinite, pair))]
    marked = [token for token in worst if math.isfinite(token.engine) and math.isfinite(token.trainer)]
    if not finite:
        return None
    low = min(min(min(pair) for pair in finite), *(min(token.engine, token.trainer) for token in marked), -1e-3)
    top, bottom = 10.0, 312.0
    across = Scale(low=1.04 * low, high=0.0, start=LEFT, end=RIGHT)
    up = Scale(low=1.04 * low, high=0.0, start=bottom, end=top)
    dots = "".join(f"M{across(x):.1f} {up(y):.1f}h0" for x, y in finite)
    return figure(
        f"Log-probability by the engine and by the trainer of {len(finite)} tokens, with the diagonal of a match",
        bottom + 38,
        x_axis(across, top, bottom, "engine: log-probability (nats)"),
        y_axis(up, LEFT, RIGHT, "trainer: log-probability (nats)"),
        line(across(across.low), up(up.low), across(0.0), up(0.0), "diagonal"),
        tag("path", d=dots, class_="points"),
        *(dot(across(token.engine), up(token.trainer), 5, "bad ring", _about(token)) for token in reversed(marked)),
    )


def _about(token: WorstToken) -> str:
    where = f"row {token.row}, token {token.position}: {shorten(token.token, 40)!r}"
    return f"{where}, engine {number(token.engine)}, trainer {number(token.trainer)}"


def histogram(bins: Sequence[tuple[float, float, int]]) -> Plot:
    """Return the histogram of l = trainer - engine, with counts on a log axis that starts at one half.

    Bins wider than twice the median width, as at the sparse ends, are grey: they would seem to hold more tokens.
    """
    drawn = [each for each in bins if math.isfinite(each[0]) and math.isfinite(each[1]) and each[0] < each[1]]
    most = max((count for _, _, count in drawn), default=0)
    if not most:
        return None
    top, bottom = 10.0, 230.0
    across = Scale(low=min(each[0] for each in drawn), high=max(each[1] for each in drawn), start=LEFT, end=RIGHT)
    up = Scale(low=0.5, high=1.5 * most, start=bottom, end=top, log=True)
    usual = median(high - low for low, high, _ in drawn)
    bars = [
        rect(
            across(low) + 0.3,
            up(count),
            across(high) - across(low) - 0.6,
            bottom - up(count),
            "muted" if high - low > 2 * usual else "data",
            f"l from {number(low)} to {number(high)}: {count} tokens",
        )
        for low, high, count in drawn
        if count
    ]
    zero = [line(across(0.0), top, across(0.0), bottom, "diagonal")] if across.low < 0 < across.high else []
    return figure(
        f"Histogram of l, trainer minus engine, of {sum(count for _, _, count in drawn)} tokens",
        bottom + 38,
        x_axis(across, top, bottom, "l = trainer − engine (nats)"),
        y_axis(up, LEFT, RIGHT, "tokens (log scale)"),
        *bars,
        *zero,
    )


def shares(round_: Round, blamed: Sequence[FactorResult]) -> Plot:
    """Return the share that each factor explains, ranked; causes, those in `blamed`, are highlighted."""
    if not round_.factors:
        return None
    known = [factor.share for factor in round_.factors if math.isfinite(factor.share)]
    bottom = ROW * len(round_.factors)
    # A change can make it worse without bound: such a bar is cut, its number is not
    across = Scale(low=max(-0.25, min([0.0, *known])), high=1.0, start=8.0, end=RIGHT)
    drawn: list[Markup] = []
    for i, factor in enumerate(round_.factors):
        y = ROW * i
        best = any(factor is cause for cause in blamed)
        drawn.append(_row(y, factor.title, explained(factor.share), best))
        drawn += [line(across(tick), y + LANE, across(tick), y + ROW - 2) for tick in (0.5, 1.0)]
        if math.isfinite(factor.share):
            start, end = sorted((across(0.0), across(factor.share)))
            about = f"{factor.title}: {factor.change}"
            drawn.append(rect(start, y + LANE + 2, max(end - start, 1.0), 9, "bad" if best else "muted", about))
        drawn.append(line(across(0.0), y + LANE, across(0.0), y + ROW - 2, "axis"))
    ticks = [(0.0, "middle" if across(0.0) > 20 else None), (0.5, "middle"), (1.0, "end")]
    return figure(
        "Share of the mismatch that each factor explains: "
        + ", ".join(f"{factor.title} {explained(factor.share)}" for factor in round_.factors),
        bottom + 38,
        *drawn,
        *(text(across(tick), bottom + 13, percent(tick), "tick", anchor) for tick, anchor in ticks),
        text((8 + RIGHT) / 2, bottom + 31, "share of the mean squared mismatch explained", "label", "middle"),
    )


def _row(y: float, name: str, value: str, strong: bool) -> Markup:
    """The words above a lane: name at the left, value at the right."""
    best = " best" if strong else ""
    return join(
        (
            text(8, y + 12, shorten(name, 40 if strong else 46), f"name{best}"),
            text(RIGHT, y + 12, value, f"value{best}", "end"),
        ),
    )


def noise_strip(audit: Audit) -> Plot:
    """Return root mean square differences on a log axis: noise sources, noise floor, mismatch, and what is left."""
    rows: list[tuple[str, Distance, str]] = [
        (f"{source.side}: {source.name}" + ("" if source.in_floor else " (not in the floor)"), source.distance,
         "data" if source.in_floor else "data ring")
        for source in audit.noise
    ]  # fmt: skip
    tone = "bad" if audit.verdict == "mismatch" else "good"
    rows.append(("engine against trainer", audit.comparison.distance, tone))
    if (left := cured(audit)) is not None:
        rows.append(("engine against trainer, after the remedy", left, "good"))
    floor = audit.floor.rms
    positive = [rms for rms in (floor, *(each.rms for _, each, _ in rows)) if math.isfinite(rms) and rms > 0]
    if not positive:
        return None
    top = 20.0
    bottom = top + ROW * len(rows)
    # One decade more on the left, where a difference of exactly 0 is drawn
    low = 10.0 ** (math.floor(math.log10(min(positive))) - 1)
    across = Scale(low=low, high=10.0 ** math.ceil(math.log10(max(positive)) + 1e-9), start=8.0, end=RIGHT, log=True)
    place = across(floor) if floor > 0 else across.start
    anchor = None if place < 0.25 * WIDTH else "middle" if place < 0.75 * WIDTH else "end"
    ticks = across.ticks()
    return figure(
        "Root mean square difference in nats: " + ", ".join(f"{name} {number(each.rms)}" for name, each, _ in rows),
        bottom + 38,
        text(place, 12, f"noise floor {number(floor)}", "label", anchor),
        *(_lane(across, floor, top + ROW * i, *each) for i, each in enumerate(rows)),
        *(text(across(t), bottom + 13, number(t), "tick", "middle" if across(t) > 20 else None) for t in ticks),
        text((8 + RIGHT) / 2, bottom + 31, "root mean square difference (nats, log scale)", "label", "middle"),
    )


def _lane(across: Scale, floor: float, y: float, name: str, distance: Distance, kind: str) -> Markup:
    """One row of the strip: name and value, below them the noise floor, the grid and the mark."""
    top, bottom = y + LANE, y + ROW - 2
    parts = [_row(y, name, number(distance.rms), kind in ("bad", "good"))]
    if floor > 0:
        parts.append(rect(across.start, top, across(floor) - across.start, bottom - top, "floor"))
    parts += [line(across(tick), top, across(tick), bottom) for tick in across.ticks()]
    if floor > 0:
        parts.append(line(across(floor), top, across(floor), bottom, "floor-edge"))
    if math.isfinite(distance.rms):
        x, middle = across(distance.rms), (top + bottom) / 2
        far = f"mean |l| {number(distance.mean_abs)}, largest {number(distance.max_abs)}, k3 {number(distance.k3)}"
        parts += [line(across.start, middle, x, middle, "track"), dot(x, middle, 5, kind, f"{name}: {far}")]
    return join(parts)


def bin_bars(bins: Sequence[Bin], head: str) -> Plot:
    """Return mean |l| in each bin as a horizontal bar beside the number of tokens; `head` is their title."""
    if not bins:
        return None
    largest = max((each.mean_abs for each in bins if math.isfinite(each.mean_abs)), default=0.0)
    row, top = 22.0, 24.0
    across = Scale(low=0.0, high=largest or 1.0, start=104.0, end=258.0)
    drawn = [
        text(98, 14, head, "label", "end"),
        text(104, 14, "mean |l| (nats)", "label"),
        text(RIGHT, 14, "tokens", "label", "end"),
    ]
    for i, each in enumerate(bins):
        y = top + row * i
        drawn.append(text(98, y + 14, shorten(each.label, 15), "tick", "end"))
        if math.isfinite(each.mean_abs):
            about = f"{each.label}: mean |l| {number(each.mean_abs)} nats, k3 {number(each.k3)}, {each.tokens} tokens"
            drawn.append(rect(across.start, y + 4, across(each.mean_abs) - across.start, 13, "data", about))
            drawn.append(text(across(each.mean_abs) + 4, y + 14, number(each.mean_abs), "tick"))
        else:
            drawn.append(text(across.start, y + 14, number(each.mean_abs), "tick"))
        drawn.append(text(RIGHT, y + 14, str(each.tokens), "tick", "end"))
    return figure(
        f"Mean absolute difference in nats by {head}: "
        + ", ".join(f"{each.label} {number(each.mean_abs)}" for each in bins),
        top + row * len(bins) + 6,
        *drawn,
        line(across.start, top, across.start, top + row * len(bins), "axis"),
    )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values to positions on an axis."""

    low: float
    """Smallest value on the axis."""
    high: float
    """Largest value on the axis; above `low`."""
    start: float
    """Position of the smallest value."""
    end: float
    """Position of the largest value; less than `start` on an axis that grows upwards."""
    log: bool = False
    """Whether the axis is logarithmic; then `low` is above 0."""

    def __call__(self, value: float) -> float:
        """Return the position of a value; values beyond the axis are moved to its ends."""
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
    """Return the SVG; `title` describes the plot to screen readers."""
    return tag("svg", *content, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=title)


def text(x: float, y: float, content: Content, kind: str = "", anchor: str | None = None) -> Markup:
    """Return text; (x, y) is its baseline, `kind` a CSS class, `anchor` middle or end."""
    return tag("text", content, x=x, y=y, class_=kind or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> Markup:
    """Return a line from (x1, y1) to (x2, y2)."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Markup:
    """Return a rectangle that shows `title` under the pointer."""
    return tag("rect", *_title(title), x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=kind)


def dot(x: float, y: float, radius: float, kind: str, title: str = "") -> Markup:
    """Return a circle that shows `title` under the pointer."""
    return tag("circle", *_title(title), cx=x, cy=y, r=radius, class_=kind)


def x_axis(scale: Scale, top: float, bottom: float, label: str, most: int = 6) -> Markup:
    """Return a horizontal axis: grid lines, ticks below, label."""
    return join(
        (
            *(line(scale(tick), top, scale(tick), bottom) for tick in scale.ticks(most)),
            *(text(scale(tick), bottom + 14, number(tick), "tick", "middle") for tick in scale.ticks(most)),
            text((scale.start + scale.end) / 2, bottom + 31, label, "label", "middle"),
        )
    )


def y_axis(scale: Scale, left: float, right: float, label: str, most: int = 6) -> Markup:
    """Return a vertical axis: grid lines, ticks at the left, label."""
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
