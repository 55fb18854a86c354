"""An audit as one HTML file that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Iterator

from app.audit.report.markup import STYLE, Markup, join, tag
from app.audit.report.plots import Plot, bin_bars, histogram, noise_strip, scatter, shares
from app.audit.report.tables import (
    checks_table,
    factors_table,
    gates_table,
    metrics_table,
    noise_table,
    settings_table,
    timings_table,
    worst_list,
)
from app.audit.report.wording import blame, causes, cured, gate_line, number, remedy, round_title, times_the_floor
from app.audit.types import Audit, FactorResult

VERDICTS = {
    "match": ("good", "✓ Match"),
    "within noise": ("good", "✓ Within noise"),
    "mismatch": ("bad", "✕ Mismatch"),
}
"""Tone and headline by verdict: sign and word carry the meaning without the colour."""
_HEAD = (
    '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; img-src data:\"/>"
    '<link rel="icon" href="data:,"/>'
)
"""The policy forbids every request, whatever a token's text is; the empty icon avoids the request for one."""


def page(audit: Audit) -> str:
    """Return the page. All text of the audit is escaped, and the page is also well-formed XML."""
    _, headline = VERDICTS[audit.verdict]
    head = tag("head", Markup(_HEAD), tag("title", f"Audit: {headline[2:].lower()}"), tag("style", Markup(STYLE)))
    body = tag("body", tag("main", *_overview(audit), *_pictures(audit), *_tables(audit)))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _overview(audit: Audit) -> Iterator[Markup]:
    """The top of the page: is there a problem, how big, whose fault, what to do."""
    tone, headline = VERDICTS[audit.verdict]
    tokens = audit.comparison.distance.tokens
    yield tag(
        "header",
        tag("h1", headline),
        tag("p", audit.summary),
        tag("p", f"{audit.mode.capitalize()} audit of {tokens} token{'' if tokens == 1 else 's'}", class_="quiet"),
        class_=f"box verdict {tone}",
    )
    failed = [
        *((check.name, check.detail) for check in audit.checks if check.passed is False),
        *((f"gate {gate.key}", gate_line(gate)) for gate in audit.gates if not gate.passed),
    ]
    if failed:
        items = (tag("li", tag("span", f"✕ {name}", class_="bad-text"), f": {detail}") for name, detail in failed)
        yield tag("ul", *items, class_="box alerts")
    yield tag(
        "div",
        tag("div", tag("h2", "How big?"), *_size(audit), class_="box"),
        tag("div", tag("h2", "Whose fault?"), *_blame(audit), class_="box"),
        tag("div", tag("h2", "What to do?"), *_cure(audit), class_="box"),
        class_="cards",
    )


def _size(audit: Audit) -> Iterator[Markup]:
    distance, floor = audit.comparison.distance, audit.floor
    if not distance.tokens:
        yield tag("p", "Not known", class_="big")
        yield tag("p", "No token has a log-probability on both sides.")
        return
    yield tag("p", f"{number(distance.mean_abs)} nats", class_="big")
    yield tag("p", "between engine and trainer on the log-probability of a token, on average (mean |l|)")
    if (times := times_the_floor(audit)) is not None:
        yield tag("p", tag("b", f"{number(times)} ×"), " the noise floor (root mean square)")
    yield tag("p", f"k3 {number(distance.k3)}, largest |l| {number(distance.max_abs)} nats", class_="quiet")
    yield tag("p", f"Noise floor: {number(floor.mean_abs)} nats, k3 {number(floor.k3)}", class_="quiet")


def _blame(audit: Audit) -> Iterator[Markup]:
    blamed = blame(audit)
    for factor, part in blamed:
        yield tag(
            "div",
            tag("p", factor.title, class_="big"),
            tag("p", _owner(factor), ": ", tag("code", factor.change)),
            tag("p", "explains ", tag("b", part)),
            class_="cause",
        )
    if not blamed and audit.verdict != "mismatch":
        yield tag("p", "Nobody's", class_="big")
        yield tag("p", "The difference is that of rounding, or no more than what each side differs from itself.")
    elif not blamed:
        yield tag("p", "Not found", class_="big")
        yield tag("p", "No factor that was tried explains half of it.")
    if any(check.passed is False for check in audit.checks):
        yield tag("p", "See the failed checks above too.", class_="bad-text")


def _owner(factor: FactorResult) -> str:
    return {"engine": "the engine", "trainer": "the trainer", "both": "both sides"}[factor.side]


def _cure(audit: Audit) -> Iterator[Markup]:
    if fragment := remedy(causes(audit)):
        yield tag("p", "Save it as remedy.yaml and add ", tag("code", "--config remedy.yaml", class_="nowrap"), ":")
        yield tag("pre", fragment, tabindex="0")
        if (left := cured(audit)) is not None:
            yield tag("p", "Left with it: ", tag("b", f"{number(left.mean_abs)} nats", class_="good-text"),
                      f", k3 {number(left.k3)}")  # fmt: skip
    elif audit.verdict == "mismatch":
        yield tag("p", "Look at the plots", class_="big")
        hint = " The thorough mode tries more factors." if audit.mode == "quick" else ""
        yield tag("p", "Growth with the position, or a few worst tokens of one kind, are a lead." + hint)
    else:
        yield tag("p", "Nothing", class_="big")
        yield tag("p", "Engine and trainer agree as far as can be measured.")


def _pictures(audit: Audit) -> Iterator[Markup]:
    found = audit.comparison
    figures = [
        ("Beside the noise floor", "each side against itself, then one against the other", noise_strip(audit)),
        *(
            (round_title(i, round_, audit), "share explained by each factor alone", shares(round_, causes(audit)))
            for i, round_ in enumerate(audit.rounds, start=1)
        ),
        (
            "Token by token",
            "rings: the worst tokens; on the dashed line both agree",
            scatter(found.scatter, found.worst),
        ),
        (
            "Differences",
            "left of 0 the trainer gives less than the engine; grey: wider bins",
            histogram(found.histogram),
        ),
        ("By position", "growth: an error that accumulates", bin_bars(found.by_position, "position")),
        ("By probability", "of the token, by both sides' mean", bin_bars(found.by_probability, "probability")),
    ]
    yield tag("h2", "Pictures")
    yield tag("div", *(_picture(*each) for each in figures), class_="plots")


def _picture(title: str, detail: str, plot: Plot) -> Markup:
    drawing = plot if plot is not None else tag("p", "Nothing to draw: no finite value.", class_="quiet")
    return tag("figure", tag("figcaption", title, tag("span", detail)), drawing)


def _tables(audit: Audit) -> Iterator[Markup]:
    sections = [
        ("Factors", [factors_table(i, round_, audit) for i, round_ in enumerate(audit.rounds, start=1)]),
        ("Checks", [checks_table(audit.checks)]),
        ("Gates", [gates_table(audit.gates)]),
        ("Worst tokens", [worst_list(audit.comparison.worst)]),
        ("Each side against itself", [noise_table(audit.noise)]),
        ("Metrics", [metrics_table(audit.comparison)]),
        ("What was audited", [settings_table(audit.settings)]),
        ("Seconds", [timings_table(audit.seconds)]),
        (
            "Notes",
            [tag("ul", *(tag("li", note) for note in audit.notes), class_="box alerts") if audit.notes else None],
        ),
    ]
    for title, tables in sections:
        if shown := join(each for each in tables if each is not None):
            yield join((tag("h2", title), shown))
