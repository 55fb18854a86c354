"""The elements of the page: HTML and SVG from text that is escaped unless it is markup already, and their style.

The palette is Okabe and Ito's (2008), which every kind of colour vision can distinguish, darkened or lightened until
letters have a contrast of 4.5 to 1 with the background (WCAG 2.2, 1.4.3), in light and in dark mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from app.audit.report.wording import number, visible


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


Content = str | float | None
"""Content of an element: a plain str is escaped, a Markup is not, a number has three significant digits."""


def tag(name: str, *content: Content, **attributes: str | float | None) -> Markup:
    """Return an element: `tag("td", 3.14159, class_="number")` is `<td class="number">3.14</td>`.

    Args:
        name: name of the element.
        content: the content, in order.
        attributes: in a name a trailing `_` is dropped, others become `-`; None leaves the attribute out; numbers are
            coordinates with one decimal place.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(content: Iterable[Content]) -> Markup:
    """Return the contents joined, escaped where they are not markup."""
    return Markup("".join(_content(item) for item in content))


def _content(item: Content) -> str:
    if isinstance(item, Markup):
        return item
    return escape(visible(item, keep="\n") if isinstance(item, str) else number(item))


def _attribute(value: str | float) -> str:
    return escape(visible(value, keep="\n")) if isinstance(value, str) else coordinate(value)


def coordinate(value: float) -> str:
    """Return a length in user units with at most one decimal place."""
    return f"{value:.1f}".removesuffix(".0")


LIGHT = {
    "page": "#f6f5f2",
    "box": "#ffffff",
    "ink": "#1c1f23",
    "quiet": "#565c64",
    "edge": "#d9d7d1",
    "bad": "#b84700",
    "good": "#00734f",
    "data": "#0069a8",
    "muted": "#9aa1a9",
    "code": "#f1efea",
    "shade": "#e3edf4",
}
DARK = {
    "page": "#14171a",
    "box": "#1d2125",
    "ink": "#e9e7e2",
    "quiet": "#a8aeb5",
    "edge": "#363c42",
    "bad": "#ff9a52",
    "good": "#3fcf9f",
    "data": "#62b8f0",
    "muted": "#6d757d",
    "code": "#15181b",
    "shade": "#223342",
}
"""Colours by use; letters have the colours `ink`, `quiet`, `bad`, `good` and `data`."""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 20px 60px; }
h1, h2, h3, p, figure, pre, dl, dd, ul, ol { margin: 0; padding: 0; }
h2 { font-size: 20px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; }
a { color: var(--data); }
.quiet { color: var(--quiet); }
.bad-text { color: var(--bad); font-weight: 600; }
.good-text { color: var(--good); font-weight: 600; }
.box, figure, .scroll { background: var(--box); border: 1px solid var(--edge); border-radius: 8px; }
.verdict { padding: 18px 22px; border-left: 8px solid var(--tone); }
.verdict h1 { color: var(--tone); font-size: 30px; line-height: 1.2; margin-bottom: 6px; }
.verdict p { font-size: 18px; overflow-wrap: anywhere; }
.bad { --tone: var(--bad); }
.good { --tone: var(--good); }
.cards { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 14px; margin-top: 14px; }
.cards > div { padding: 14px 18px; overflow-wrap: anywhere; }
.cards h2 { font-size: 14px; font-weight: 600; color: var(--quiet); margin: 0 0 4px; }
.big { font-size: 22px; font-weight: 650; line-height: 1.25; }
.cards p + p { margin-top: 4px; }
.cause + .cause { margin-top: 10px; padding-top: 10px; border-top: 1px solid var(--edge); }
pre { background: var(--code); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 10px; margin-top: 6px;
  font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; }
.alerts { list-style: none; padding: 10px 18px; overflow-wrap: anywhere; }
.verdict + .alerts { margin-top: 14px; }
.plots { columns: 3; column-gap: 14px; }
.plots figure { break-inside: avoid; margin-bottom: 14px; }
figure { padding: 12px 12px 8px; }
figcaption { font-size: 15px; font-weight: 600; margin: 0 2px 6px; }
figcaption span { display: block; font-weight: 400; font-size: 13px; color: var(--quiet); }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); }
svg .tick, svg .label { fill: var(--quiet); font-size: 11.5px; }
svg .value { font-variant-numeric: tabular-nums; }
svg .best { font-weight: 700; }
.grid { stroke: var(--edge); }
.axis, .floor-edge { stroke: var(--quiet); }
.floor-edge { stroke-dasharray: 4 3; }
.track { stroke: var(--muted); stroke-width: 1.5; }
.diagonal { stroke: var(--ink); stroke-dasharray: 5 4; }
.points { fill: none; stroke: var(--data); stroke-width: 3.2; stroke-linecap: round; stroke-opacity: .65; }
rect.data, circle.data { fill: var(--data); }
rect.muted { fill: var(--muted); }
rect.floor { fill: var(--shade); }
rect.bad, circle.bad { fill: var(--bad); }
rect.good, circle.good { fill: var(--good); }
circle.ring { fill: var(--box); stroke: var(--data); stroke-width: 2; }
circle.bad.ring { fill: none; stroke: var(--bad); }
.scroll { overflow-x: auto; margin-bottom: 14px; width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 7px 12px; border-bottom: 1px solid var(--edge); }
tr:last-child > td { border-bottom: 0; }
th { font-size: 13px; color: var(--quiet); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.nowrap { white-space: nowrap; }
td pre { margin-top: 0; }
td code, .context { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
td.long { min-width: 240px; max-width: 620px; overflow-wrap: anywhere; }
tr.best > td:first-child { box-shadow: inset 4px 0 var(--bad); }
.worst { list-style: none; display: grid; gap: 10px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.worst li { padding: 10px 14px; }
.worst p { font-size: 13px; color: var(--quiet); font-variant-numeric: tabular-nums; }
mark { background: var(--bad); color: var(--box); border-radius: 3px; padding: 1px 2px; white-space: pre-wrap; }
details { margin-bottom: 14px; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
@media (max-width: 1000px) {
  .cards, .worst { grid-template-columns: minmax(0, 1fr); }
  .plots { columns: 2; }
}
@media (max-width: 560px) {
  main { padding: 10px 10px 40px; }
  .verdict { padding: 14px 16px; }
  .verdict h1 { font-size: 26px; }
  .verdict p { font-size: 16px; }
  h2 { margin-top: 30px; }
  .plots { columns: 1; }
  .stack thead { display: none; }
  .stack { width: auto; }
  .stack table, .stack tbody, .stack tr, .stack td { display: block; }
  .stack td, .stack td.number { border: 0; padding: 2px 12px; text-align: left; min-width: 0; }
  .stack td[data-label].number, .stack td[data-label].nowrap { display: inline-block; padding-right: 0; }
  .stack td[data-label]:empty { display: none; }
  .stack td[data-label]::before { content: attr(data-label) ": "; color: var(--quiet); font-size: 13px; }
  .stack tr { border-bottom: 1px solid var(--edge); padding: 8px 0; }
  .stack tr.best { box-shadow: inset 4px 0 var(--bad); }
  .stack tr.best > td:first-child { box-shadow: none; }
}
@media print { .scroll { overflow: visible; } }
"""
)
"""The style sheet. It contains no ampersand and no opening angle bracket, so that the page is well-formed XML too."""
