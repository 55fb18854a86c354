"""The plots of an audit: one function a plot, each returns an SVG, or nothing where there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from app.audit.report.axes import WIDTH, Scale, dot, figure, line, rect, text, x_axis, y_axis
from app.audit.report.markup import Markup, join, tag
from app.audit.report.wording import cured, explained, number, percent, shorten
from app.audit.types import Audit, Bin, Distance, FactorResult, Round, WorstToken

Plot = Markup | None
LEFT, RIGHT = 48.0, WIDTH - 14.0
"""Ends of the drawing area beside a vertical axis."""
ROW, LANE = 34.0, 17.0
"""Height of a row that has words above its mark, and where in it the lane of the mark begins."""


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
    """Return how many tokens have which l = trainer - engine, counted on a log axis that starts at one half.

    Bins wider than twice the usual, as at the ends where tokens are few, are muted: they would seem to hold more.
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
    """Return the share that each factor explains, ranked; a cause, one of `blamed`, is highlighted."""
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
    """The line of words above a lane: a name at the left, a value at the right."""
    best = " best" if strong else ""
    return join(
        (
            text(8, y + 12, shorten(name, 40 if strong else 46), f"name{best}"),
            text(RIGHT, y + 12, value, f"value{best}", "end"),
        ),
    )


def noise_strip(audit: Audit) -> Plot:
    """Return root mean square differences on a log axis: every noise source, the floor, the mismatch, what is left."""
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
    """One row of the strip: its name and value, and beneath them the floor, the grid and its mark."""
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
    """Return mean |l| of every bin as a horizontal bar beside its number of tokens; `head` names the bins."""
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
