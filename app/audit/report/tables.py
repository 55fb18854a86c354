"""The tables of the page. Each function returns None where the table would have no rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from app.audit.report.markup import Content, Markup, join, tag
from app.audit.report.wording import causes, explained, number, percent, reported_metrics, round_title, shorten
from app.audit.types import Audit, Check, Comparison, Gate, NoiseSource, Round, WorstToken

NUMBER, LONG, NOWRAP = "number", "long", "nowrap"
"""CSS classes of columns."""
LONGEST_TOKEN = 80
"""Most characters of a token that are shown."""


def table(
    label: str, head: Mapping[str, str], rows: Iterable[Sequence[Content]], best: int | None = None, stack: bool = False
) -> Markup | None:
    """Return a table in a box that scrolls sideways where it is too wide for the screen.

    Args:
        label: name of the table for screen readers.
        head: CSS class of each column by its title; "" for none.
        rows: the cells of each row.
        best: index of the row to highlight; None: no row.
        stack: whether a phone shows each row's cells one below the other, after their titles, instead of scrolling.
    """
    columns = [(title, kind or None) for title, kind in head.items()]
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, class_=kind, data_label=title if place else None)
                for place, (cell, (title, kind)) in enumerate(zip(row, columns, strict=True))
            ),
            class_="best" if i == best else None,
        )
        for i, row in enumerate(rows)
    ]
    if not body:
        return None
    titles = tag("tr", *(tag("th", title, class_=kind, scope="col") for title, kind in columns))
    inner = tag("table", tag("thead", titles), tag("tbody", *body))
    kind = "scroll stack" if stack else "scroll"
    return tag("div", inner, class_=kind, role="region", aria_label=label, tabindex="0")


def factors_table(index: int, round_: Round, audit: Audit) -> Markup | None:
    """Return the factors of a round, each with its remedy."""
    title = round_title(index, round_, audit)
    head = {"factor": LONG, "explains": NUMBER, "left: mean |l| (nats)": NUMBER, "left: k3": NUMBER, "remedy": LONG}
    rows: list[list[Content]] = [
        [
            join(
                (
                    tag("b", factor.title),
                    f" ({factor.side})",
                    tag("div", factor.change),
                    tag("div", factor.evidence, class_="quiet"),
                )
            ),
            explained(factor.share),
            factor.left.mean_abs,
            factor.left.k3,
            tag("pre", factor.remedy, tabindex="0"),
        ]
        for factor in round_.factors
    ]
    blamed = causes(audit)
    best = next((i for i, factor in enumerate(round_.factors) if any(factor is each for each in blamed)), None)
    start = f": mean |l| {number(round_.start.mean_abs)} nats, k3 {number(round_.start.k3)}"
    found = table(title, head, rows, best, stack=True)
    return None if found is None else join((tag("h3", title + start), found))


def _state(passed: bool | None) -> Markup:
    if passed is None:
        return tag("span", "? not checked", class_="quiet")
    return tag("span", "✓ passed", class_="good-text") if passed else tag("span", "✕ failed", class_="bad-text")


def checks_table(checks: Sequence[Check]) -> Markup | None:
    """Return all checks, failed ones first."""
    ranked = sorted(checks, key=lambda check: {False: 0, None: 1, True: 2}[check.passed])
    head = {"check": NOWRAP, "result": NOWRAP, "found": LONG}
    return table("Checks", head, ([check.name, _state(check.passed), check.detail] for check in ranked), stack=True)


def gates_table(gates: Sequence[Gate]) -> Markup | None:
    """Return the bounds set by --fail-above."""
    head = {"metric": NOWRAP, "result": NOWRAP, "measured": NUMBER, "allowed": NUMBER}
    return table("Gates", head, ([gate.key, _state(gate.passed), gate.value, gate.bound] for gate in gates))


def noise_table(noise: Sequence[NoiseSource]) -> Markup | None:
    """Return the noise of each side against itself."""
    head = {"changed": LONG, "side": NOWRAP, "mean |l| (nats)": NUMBER, "largest |l| (nats)": NUMBER, "k3": NUMBER,
            "noise floor": NOWRAP}  # fmt: skip
    rows = (
        [source.name, source.side, source.distance.mean_abs, source.distance.max_abs, source.distance.k3,
         "counts" if source.in_floor else "does not count"]
        for source in noise
    )  # fmt: skip
    return table("Each side against itself", head, rows, stack=True)


def metrics_table(comparison: Comparison) -> Markup | None:
    """Return every metric with its healthy range and state, then the agreement on the likeliest tokens."""
    head = {
        "metric": NOWRAP,
        "value": NUMBER,
        "unit": NOWRAP,
        "state": NOWRAP,
        "healthy": NOWRAP,
        "definition": LONG,
    }
    marks: dict[str, Content] = {
        "": "",
        "healthy": tag("span", "✓", class_="good-text", role="img", aria_label="healthy"),
        "outside": tag("span", "▲ outside", class_="bad-text"),
        "alarm": tag("span", "✕ alarm", class_="bad-text"),
    }
    rows: list[list[Content]] = []
    for metric in reported_metrics(comparison.metrics):
        unit, healthy, definition = "", "", ""
        if (info := metric.info) is not None:
            unit, healthy, definition = info.unit, str(info.healthy or ""), info.definition
        rows.append([tag("code", metric.key), metric.value, unit, marks[metric.state], healthy, definition])
    rows += [
        ["same likeliest token", percent(comparison.top1_agreement), "", "", "", "tokens on which both agree"],
        ["shared likeliest tokens", percent(comparison.topk_overlap), "", "", "", "of K, in both sides' lists"],
        ["|l| of the likeliest", number(comparison.topk_drift), "nats", "", "", "mean |l| of those in both lists"],
    ]  # fmt: skip
    return table("Metrics", head, rows, stack=True)


def worst_list(worst: Sequence[WorstToken]) -> Markup | None:
    """Return the worst tokens, highlighted in their context."""
    if not worst:
        return None
    items = [
        tag(
            "li",
            tag(
                "div",
                token.before.replace("\n", "↵"),
                tag("mark", shorten(token.token, LONGEST_TOKEN).replace("\n", "↵")),
                token.after.replace("\n", "↵"),
                class_="context",
            ),
            tag(
                "p",
                tag("b", f"l = {number(token.trainer - token.engine)} nats", class_="bad-text"),
                f": engine {number(token.engine)}, trainer {number(token.trainer)}; row {token.row}, ",
                f"token {token.position}, id {token.token_id}",
            ),
            class_="box",
        )
        for token in worst
    ]
    return tag("ol", *items, class_="worst")


def settings_table(settings: Mapping[str, str]) -> Markup | None:
    """Return the settings that were audited."""
    return table(
        "What was audited", {"setting": NOWRAP, "value": LONG}, ([key, value] for key, value in settings.items())
    )


def timings_table(seconds: Mapping[str, float]) -> Markup | None:
    """Return the wall time of each stage in seconds."""
    total = [["all", f"{sum(seconds.values()):.1f}"]] if seconds else []
    rows = [[name, f"{value:.1f}"] for name, value in seconds.items()]
    return table("Seconds", {"stage": NOWRAP, "seconds": NUMBER}, rows + total)
