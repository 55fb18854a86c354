"""An audit as text, JSON and a page: complete, escaped, self-contained, and whole where much is missing."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import yaml

from app.audit.report.html import page
from app.audit.report.json import from_json, to_json
from app.audit.report.text import terminal
from app.audit.report.wording import causes, remedy
from app.audit.types import Audit
from app.errors import LockstepError
from tests.audit.sample_audit import bare_audit, healthy_audit, mismatch_audit

AUDITS = {"mismatch": mismatch_audit, "healthy": healthy_audit, "bare": bare_audit}
audits = pytest.mark.parametrize("make", AUDITS.values(), ids=AUDITS.keys())


class Page(HTMLParser):
    """Notes what a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.scripts = 0
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@audits
def test_the_page_is_self_contained_and_well_formed(make) -> None:
    html = page(make())
    found = Page()
    found.feed(html)
    assert found.scripts == 0
    assert set(found.loaded) <= {"data:,"}  # no icon: nothing is asked for
    assert not found.open
    assert "url(" not in html
    assert "@import" not in html
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert pictures or make is bare_audit
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_token_texts_cannot_break_out() -> None:
    audit = mismatch_audit()
    hostile = dataclasses.replace(audit.comparison.worst[0], token="</td><script>alert(1)</script>", before="<b>&amp;")
    comparison = dataclasses.replace(audit.comparison, worst=(hostile,))
    html = page(dataclasses.replace(audit, comparison=comparison))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "&lt;b&gt;&amp;amp;" in html
    assert "\x1b" not in terminal(audit)  # no control sequence reaches a terminal


@audits
def test_json_gives_the_audit_back(make) -> None:
    audit: Audit = make()
    again = from_json(to_json(audit))
    assert to_json(again) == to_json(audit)
    assert again.verdict == audit.verdict
    assert again.rounds == audit.rounds
    assert again.noise == audit.noise
    plain = json.loads(to_json(audit), parse_constant=pytest.fail)  # no NaN or Infinity: not JSON
    assert plain["version"] == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "verdict": "fine"}'])
def test_a_foreign_file_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(LockstepError) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)


def test_everything_found_is_in_text_and_page() -> None:
    audit = mismatch_audit()
    text, html = terminal(audit), page(audit)
    for factor in audit.rounds[0].factors:
        assert factor.title.split()[0] in text
        assert factor.title.split()[0] in html
        assert factor.remedy.splitlines()[0].strip()[:20] in html
    for check in audit.checks:
        assert check.name in text
        assert check.name in html
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_remedy_is_one_document_with_the_keys_of_all_causes() -> None:
    audit = mismatch_audit()
    fragment = remedy(causes(audit))
    assert isinstance(yaml.safe_load(fragment), dict)
    assert fragment.splitlines()[0] in terminal(audit)


def test_what_explains_less_than_half_is_not_called_the_cause() -> None:
    audit = mismatch_audit()
    first = audit.rounds[0]
    weak = dataclasses.replace(
        first.factors[0], share=0.23, left=dataclasses.replace(first.start, rms=0.9 * first.start.rms)
    )
    weak_audit = dataclasses.replace(audit, rounds=(dataclasses.replace(first, factors=(weak,)),))
    assert causes(audit)
    assert not causes(weak_audit)
    assert "none of the factors explains half of it" in terminal(weak_audit)
    page(weak_audit)


def test_a_healthy_audit_has_no_remedy() -> None:
    audit = healthy_audit()
    assert not causes(audit)
    assert "Remedy" not in terminal(audit)
