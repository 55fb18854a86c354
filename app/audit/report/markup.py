"""HTML and SVG elements from text that is escaped unless it is markup already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from app.audit.report.wording import number, visible


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


Content = str | float | None
"""What an element may hold: a plain str is escaped, a Markup is not, a number is written with three digits."""


def tag(name: str, *content: Content, **attributes: str | float | None) -> Markup:
    """Return an element: `tag("td", 3.14159, class_="number")` is `<td class="number">3.14</td>`.

    Args:
        name: of the element.
        content: what is in it, in order.
        attributes: a trailing `_` is dropped, others become `-`; None leaves the attribute out; numbers are
            coordinates, with one decimal place.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(content: Iterable[Content]) -> Markup:
    """Return contents one after the other, escaped where they are not markup."""
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
