"""Numbers, words, causes, tables and pictures of the reports, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from xml.etree import ElementTree

import pytest
import yaml

from app.audit.report import from_json, page, terminal, to_json
from app.audit.report.markup import DARK, LIGHT, Markup, tag
from app.audit.report.plots import Scale, bin_bars, histogram, noise_strip, scatter, shares
from app.audit.report.wording import (
    causes,
    cured,
    gate_line,
    number,
    percent,
    remedy,
    reported_metrics,
    shorten,
    times_the_floor,
    visible,
)
from app.audit.types import Audit, Gate, Round
from app.errors import LockstepError
from tests.audit.sample_audit import (
    ATTENTION,
    CACHE,
    CACHING,
    HOSTILE,
    TEMPERATURE,
    bare_audit,
    distance,
    healthy_audit,
    mismatch_audit,
)

AUDITS = {"mismatch": mismatch_audit(), "healthy": healthy_audit(), "bare": bare_audit()}
every_audit = pytest.mark.parametrize("audit", AUDITS.values(), ids=AUDITS)


def tree(audit: Audit) -> ElementTree.Element:
    """The page as XML: a text that was not escaped would break it, or add elements."""
    return ElementTree.fromstring(page(audit).removeprefix("<!DOCTYPE html>\n"))


def words(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def rows_of(root: ElementTree.Element, label: str) -> list[dict[str, str]]:
    """The rows of a table of the page, by column."""
    box = next(each for each in root.iter("div") if each.get("aria-label") == label)
    head = [words(cell) for cell in box.iter("th")]
    rows = [[words(cell) for cell in row.iter("td")] for row in box.iter("tr")]
    return [dict(zip(head, row, strict=True)) for row in rows if row]


class TestWords:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.0, "0"),
            (0.03114, "0.0311"),
            (0.001, "0.001"),
            (3.1e-7, "3.1e-7"),
            (2.0e-4, "2e-4"),
            (-4.567e-5, "-4.57e-5"),
            (2048, "2048"),
            (123456.7, "123457"),
            (12.345, "12.3"),
            (math.nan, "nan"),
            (-math.inf, "-inf"),
            (None, "–"),
        ],
    )
    def test_number(self, value, text):
        assert number(value) == text

    @pytest.mark.parametrize(
        ("share", "text"),
        [(0.985, "98 %"), (1.0, "100 %"), (-0.004, "0 %"), (-2.25, "-225 %"), (math.nan, "–"), (None, "–")],
    )
    def test_percent(self, share, text):
        assert percent(share) == text

    def test_visible_writes_out_what_would_act(self):
        assert visible("a\n\t\x1b[2J\u202e\u200b\ud800é的") == "a↵⇥\\x1b[2J\\u202e\\u200b\\ud800é的"
        assert visible("a\nb\t", keep="\n") == "a\nb⇥"

    def test_shorten_cuts_the_middle(self):
        assert shorten("abcdefghij", 7) == "abc…hij"
        assert shorten("abcdefg", 7) == "abcdefg"

    def test_gate_line(self):
        assert gate_line(Gate(key="k3_kl", bound=1e-3, value=0.0232)) == "0.0232 > 0.001"
        assert gate_line(Gate(key="k3_kl", bound=1e-3, value=1e-3)) == "0.001 ≤ 0.001"
        assert gate_line(Gate(key="k3_kl", bound=1e-3, value=None)) == "not measured, at most 0.001 is allowed"

    def test_markup_escapes_all_but_markup(self):
        inner = Markup("<b>x</b>")
        assert tag("td", "<i>&", inner, 0.5, None, class_='a"b', data_label=None, x=1.5) == (
            '<td class="a&quot;b" x="1.5">&lt;i&gt;&amp;<b>x</b>0.5–</td>'
        )


class TestCauses:
    def test_those_taken_away_then_the_best_of_the_last_round(self):
        assert causes(mismatch_audit()) == (CACHE, TEMPERATURE)
        assert cured(mismatch_audit()) == TEMPERATURE.left

    def test_a_last_round_that_explains_nothing_blames_nobody_more(self):
        then = Round(taken_away=("kv_cache_dtype",), start=CACHE.left, factors=(CACHING, ATTENTION))
        audit = dataclasses.replace(mismatch_audit(), rounds=(mismatch_audit().rounds[0], then))
        assert causes(audit) == (CACHE,)
        assert cured(audit) == CACHE.left

    def test_nothing_to_blame(self):
        assert causes(healthy_audit()) == causes(bare_audit()) == ()
        assert cured(healthy_audit()) is None

    def test_times_the_floor_is_a_ratio_of_roots_of_mean_squares(self):
        audit = dataclasses.replace(healthy_audit(), floor=distance(1.6e-5))
        assert times_the_floor(audit) == pytest.approx(2.0)
        assert times_the_floor(dataclasses.replace(audit, floor=distance(0.0))) is None
        assert times_the_floor(bare_audit()) is None

    def test_one_remedy_is_left_as_it_is(self):
        assert remedy([CACHE]) == CACHE.remedy
        assert remedy([]) == ""

    def test_several_remedies_become_one_document_that_loses_no_key_and_no_comment(self):
        text = remedy([CACHE, CACHING, ATTENTION, TEMPERATURE])
        assert yaml.safe_load(text) == {
            "data": {
                "engine": {"init_args": {"kv_cache_dtype": "auto", "engine_args": {"enable_prefix_caching": False}}}
            },
            "model": {"attn_implementation": "eager"},
        }
        assert "# or reset the cache after every weight sync" in text
        assert all(line in text for line in TEMPERATURE.remedy.splitlines())


def test_metrics_in_the_order_of_their_table_with_their_state():
    found = list(
        reported_metrics(
            {
                "rollout_correction/abs_diff_at_position/8": 0.2,
                "strange": 1.0,
                "rollout_correction/ess": 0.5,
                "rollout_correction/nonfinite_logprob_fraction": 0.1,
                "rollout_correction/k3_kl": 1e-4,
                "rollout_correction/kl": math.nan,
                "rollout_correction/logprob_abs_diff_mean": 0.1,
            }
        )
    )
    assert [(metric.key, metric.state) for metric in found] == [
        ("kl", ""),  # no value, so nothing to judge
        ("k3_kl", "healthy"),
        ("logprob_abs_diff_mean", ""),
        ("nonfinite_logprob_fraction", "alarm"),
        ("ess", "outside"),
        ("abs_diff_at_position/8", ""),
        ("strange", ""),
    ]
    assert found[-2].info is not None
    assert found[-1].info is None


class TestJson:
    @pytest.mark.parametrize("audit", [mismatch_audit(), healthy_audit()], ids=["mismatch", "healthy"])
    def test_round_trip_is_exact(self, audit):
        assert from_json(to_json(audit)) == audit

    def test_what_is_not_finite_is_null_and_comes_back_as_nan(self):
        text = to_json(bare_audit())
        assert json.loads(text)["comparison"]["distance"]["rms"] is None
        again = from_json(text)
        assert math.isnan(again.comparison.distance.rms)
        assert math.isnan(again.comparison.scatter[0][0])
        assert again.gates[0].value is None
        assert again.comparison.top1_agreement is None
        assert again.comparison.worst[0].token == HOSTILE

    def test_keys_come_in_the_order_of_the_fields_after_the_version(self):
        data = json.loads(to_json(healthy_audit()))
        assert list(data) == ["version", *(field.name for field in dataclasses.fields(Audit))]
        assert list(data["settings"]) == list(healthy_audit().settings)

    def test_pairs_of_numbers_stand_on_one_line(self):
        x, y = mismatch_audit().comparison.scatter[0]
        assert f"[{x!r}, {y!r}]" in to_json(mismatch_audit())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda data: data.pop("version"), "it has no version"),
            (lambda data: data.update(version=2), "version 2, this program reads 1"),
            (lambda data: data.pop("floor"), "audit lacks floor"),
            (lambda data: data.update(colour="red"), "audit has an unknown colour"),
            (lambda data: data.update(verdict="bad"), 'audit.verdict is "bad"'),
            (lambda data: data["floor"].update(rms="x"), 'audit.floor.rms is "x"'),
            (lambda data: data["floor"].update(tokens=1.5), "audit.floor.tokens is 1.5"),
            (lambda data: data["floor"].update(rms=True), "audit.floor.rms is true"),
            (lambda data: data["noise"].insert(0, 3), r"audit.noise\[0\] is 3 where an object must be"),
            (lambda data: data["comparison"]["scatter"].insert(0, [1.0]), r"audit.comparison.scatter\[0\] is \[1.0\]"),
            (lambda data: data.update(notes="none"), 'audit.notes is "none"'),
        ],
    )
    def test_the_message_says_what_is_foreign(self, change, message):
        data = json.loads(to_json(healthy_audit()))
        change(data)
        with pytest.raises(LockstepError, match=message):
            from_json(json.dumps(data))


class TestTerminal:
    @every_audit
    @pytest.mark.parametrize("width", [80, 120])
    def test_nothing_but_yaml_is_wider_than_asked_and_nothing_acts_on_the_terminal(self, audit, width):
        text = terminal(audit, width)
        fragment = {f"  {line}" for line in remedy(causes(audit)).splitlines()}
        assert max(len(line) for line in text.splitlines() if line not in fragment) <= width
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)

    def test_verdict_first_then_size_causes_failures(self):
        lines = [" ".join(line.split()) for line in terminal(mismatch_audit(), 120).splitlines()]
        first = [
            "verdict MISMATCH, quick audit of 2048 tokens",
            "mismatch mean |l| 0.172 nats, largest 0.97, k3 0.0232; 3909 times the noise floor",
            "noise floor mean |l| 4.4e-5 nats, k3 1.52e-9",
            "cause key-value cache dtype (engine): fp8 -> auto; explains 99 % of it",
            "left then mean |l| 4.1e-5 nats, k3 1.32e-9",
            "GATE FAILED k3_kl 0.0232 > 0.001",
            "Remedy: save it as remedy.yaml",
            "Round 1, as configured: mean |l| 0.172 nats, k3 0.0232",
        ]
        places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in first]
        assert places == sorted(places)

    def test_every_factor_check_metric_and_bin_appears(self):
        audit = mismatch_audit()
        text = " ".join(terminal(audit).split())
        for round_ in audit.rounds:
            assert all(f"{factor.title} ({factor.side}): {factor.change}" in text for factor in round_.factors)
        assert all(check.detail in text for check in audit.checks if not check.passed)
        assert "0.0031 0.0175 7.55e-6 no trainer: in float32" in text
        assert "k3_kl 0.0232 healthy: ≤ 0.001 OUTSIDE" in text
        assert "nonfinite_logprob_fraction 0.002 healthy: 0 ALARM" in text
        assert "prob_pearson" not in text  # a detailed one: on the page
        assert "16-31 512 0.198" in text
        assert "⟦ Pythagoras⟧ said" in text
        assert audit.notes[0] in text

    def test_a_bar_is_as_long_as_its_share(self):
        lines = terminal(mismatch_audit()).splitlines()
        best = next(line for line in lines if line.endswith("fp8 -> auto") and "█" in line)
        # 0.985 of 80 eighths is 78.8, so 79: nine full columns and seven eighths
        assert best.startswith("  █████████▉   98 %")
        worse = next(line for line in lines if " worse " in line)
        assert "█" not in worse


class TestPage:
    @every_audit
    def test_it_is_well_formed_and_its_policy_allows_no_request(self, audit):
        root = tree(audit)
        assert not {element.tag for element in root.iter()} & {"script", "img", "iframe", "object", "base", "i"}
        policy = next(meta for meta in root.iter("meta") if meta.get("http-equiv") == "Content-Security-Policy")
        assert policy.get("content").startswith("default-src 'none';")

    def test_a_hostile_token_is_shown_and_does_nothing(self):
        text = words(tree(bare_audit()).find("body"))
        assert visible(HOSTILE, keep="\n") in text
        assert "\x1b" not in text
        assert "<i>factor</i>" in text
        page(bare_audit()).encode("utf-8")  # no half of a surrogate pair is left

    def test_the_overview_says_verdict_size_cause_and_cure(self):
        root = tree(mismatch_audit())
        assert words(root.find("head/title")) == "Audit: mismatch"
        assert words(root.find("body/main/header/h1")) == "✕ Mismatch"
        size, blame, cure = (words(box) for box in root.find("body/main/div[@class='cards']"))
        assert size.startswith("How big?0.172 nats")
        assert "3909 × the noise floor" in size
        assert "key-value cache dtypethe engine: fp8 -> autoexplains 99 % of it" in blame
        assert "explains another 1 % of it" in blame
        assert remedy((CACHE, TEMPERATURE)) in cure
        assert "Left with it: 4.1e-5 nats" in cure

    def test_a_healthy_pipeline_needs_nothing(self):
        root = tree(healthy_audit())
        assert words(root.find("body/main/header/h1")) == "✓ Within noise"
        _, blame, cure = (words(box) for box in root.find("body/main/div[@class='cards']"))
        assert blame.startswith("Whose fault?Nobody's")
        assert cure.startswith("What to do?Nothing")
        assert root.find("body/main/ul") is None

    def test_every_remedy_and_every_check_is_there(self):
        audit = mismatch_audit()
        root = tree(audit)
        fragments = [words(element) for element in root.iter("pre")]
        assert all(factor.remedy in fragments for round_ in audit.rounds for factor in round_.factors)
        shown = rows_of(root, "Checks")
        assert [row["check"] for row in shown] == ["end of sequence", "engine weights", "prompt ids", "special tokens"]
        assert [row["result"] for row in shown] == ["✕ failed", "? not checked", "✓ passed", "✓ passed"]
        assert {row["found"] for row in shown} == {check.detail for check in audit.checks}

    def test_cells_stand_under_their_titles(self):
        root = tree(mismatch_audit())
        half = next(row for row in rows_of(root, "Each side against itself") if row["changed"] == "half the batch")
        assert (half["side"], half["mean |l| (nats)"], half["noise floor"]) == ("engine", "4.4e-5", "counts")
        k3 = next(row for row in rows_of(root, "Metrics") if row["metric"] == "k3_kl")
        assert (k3["value"], k3["unit"], k3["state"], k3["healthy"]) == ("0.0232", "nats", "▲ outside", "≤ 0.001")
        assert k3["definition"].startswith("mean of rho - 1 - l")
        gates = rows_of(root, "Gates")
        assert gates[0] == {"metric": "k3_kl", "result": "✕ failed", "measured": "0.0232", "allowed": "0.001"}
        assert gates[2]["measured"] == "–"
        assert rows_of(root, "Seconds")[-1] == {"stage": "all", "seconds": "156.4"}

    def test_the_worst_tokens_are_marked_in_their_context(self):
        marks = [words(element) for element in tree(mismatch_audit()).iter("mark")]
        assert marks[:4] == [" Pythagoras", " 42", "↵↵", "<|im_end|>"]

    def test_every_picture_has_words_for_a_screen_reader(self):
        pictures = list(tree(mismatch_audit()).iter("svg"))
        assert len(pictures) == 7
        assert all(picture.get("role") == "img" and len(picture.get("aria-label")) > 30 for picture in pictures)


class TestPlots:
    def test_linear_scale(self):
        scale = Scale(low=-8.0, high=0.0, start=100.0, end=20.0)
        assert [scale(value) for value in (-8.0, -2.0, 0.0, 3.0)] == [100.0, 40.0, 20.0, 20.0]
        assert scale.ticks() == [-8.0, -6.0, -4.0, -2.0, 0.0]

    def test_log_scale(self):
        scale = Scale(low=1e-6, high=1.0, start=0.0, end=60.0, log=True)
        assert scale(1e-3) == pytest.approx(30.0)
        assert scale(0.0) == 0.0
        assert scale.ticks(4) == pytest.approx([1e-6, 1e-4, 1e-2, 1.0])

    @pytest.mark.parametrize("high", [1e-9, 0.03, 0.9999, 1.0, 7.3, 4e6])
    def test_linear_ticks_are_few_round_and_inside(self, high):
        ticks = Scale(low=-0.4 * high, high=high, start=0.0, end=1.0).ticks()
        assert 2 <= len(ticks) <= 6
        assert all(-0.4 * high * 1.0001 <= tick <= high * 1.0001 for tick in ticks)
        step = ticks[1] - ticks[0]
        assert round(step / 10.0 ** math.floor(math.log10(step * 1.0001)), 6) in (1, 2, 5)

    def test_a_token_on_which_both_agree_is_drawn_on_the_diagonal(self):
        root = ElementTree.fromstring(scatter([(-2.0, -2.0), (-4.0, -4.0), (math.nan, -1.0)], ()))
        path = next(root.iter("path")).get("d")
        (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in re.findall(r"M(\S+) (\S+)h0", path))
        diagonal = next(line for line in root.iter("line") if line.get("class") == "diagonal")
        ax, ay, bx, by = (float(diagonal.get(name)) for name in ("x1", "y1", "x2", "y2"))
        for x, y in ((x1, y1), (x2, y2)):
            assert (y - ay) / (by - ay) == pytest.approx((x - ax) / (bx - ax), abs=2e-3)
        assert x2 < x1
        assert y2 > y1

    def test_equal_ratios_of_counts_are_equal_heights(self):
        root = ElementTree.fromstring(histogram([(-1.0, 0.0, 1), (0.0, 1.0, 10), (1.0, 2.0, 100), (2.0, 3.0, 0)]))
        assert [bar.get("class") for bar in root.iter("rect")] == ["data"] * 3
        tops = [float(bar.get("y")) for bar in root.iter("rect")]
        assert tops[0] - tops[1] == pytest.approx(tops[1] - tops[2], abs=0.21)

    def test_wide_bins_are_muted(self):
        root = ElementTree.fromstring(histogram([(-9.0, -1.0, 2), (-1.0, 0.0, 5), (0.0, 1.0, 6), (1.0, 2.0, 1)]))
        assert [bar.get("class") for bar in root.iter("rect")] == ["muted", "data", "data", "data"]

    def test_bars_of_shares_are_as_long_as_the_share_and_a_cause_is_marked(self):
        half = dataclasses.replace(CACHING, share=0.49)
        round_ = Round(taken_away=(), start=distance(0.1), factors=(CACHE, half, ATTENTION))
        bars = list(ElementTree.fromstring(shares(round_, (CACHE,))).iter("rect"))
        assert [bar.get("class") for bar in bars] == ["bad", "muted", "muted"]
        assert float(bars[0].get("width")) / float(bars[1].get("width")) == pytest.approx(0.985 / 0.49, rel=2e-3)
        nobody = ElementTree.fromstring(shares(round_, ()))
        assert {bar.get("class") for bar in nobody.iter("rect")} == {"muted"}

    def test_the_strip_has_every_noise_source_the_floor_the_mismatch_and_what_is_left(self):
        audit = mismatch_audit()
        root = ElementTree.fromstring(noise_strip(audit))
        marks = list(root.iter("circle"))
        assert [mark.get("class") for mark in marks[-3:]] == ["data ring", "bad", "good"]
        assert len(marks) == len(audit.noise) + 2
        floor = float(next(each for each in root.iter("line") if each.get("class") == "floor-edge").get("x1"))
        places = [float(mark.get("cx")) for mark in marks]
        assert places[1] == floor  # this source is the floor
        assert places[0] == min(places)  # a difference of 0 is at the left end
        assert places[-2] == max(places)
        assert "noise floor 5.51e-5" in words(root)

    @pytest.mark.parametrize(
        ("floor", "anchor"), [(0.0, None), (1e-7, None), (4.4e-5, "middle"), (0.15, "end"), (math.nan, None)]
    )
    def test_the_name_of_the_floor_stays_inside_the_picture(self, floor, anchor):
        audit = dataclasses.replace(mismatch_audit(), floor=distance(floor), noise=())
        names = [each for each in ElementTree.fromstring(noise_strip(audit)).iter("text") if "floor" in words(each)]
        assert [each.get("text-anchor") for each in names] == [anchor]

    def test_a_difference_within_the_noise_is_not_drawn_as_bad(self):
        marks = list(ElementTree.fromstring(noise_strip(healthy_audit())).iter("circle"))
        assert marks[-1].get("class") == "good"

    def test_nothing_to_draw(self):
        assert scatter([(math.nan, -1.0)], ()) is None
        assert histogram([]) is None
        assert histogram([(0.0, 1.0, 0)]) is None
        assert bin_bars([], "position") is None
        assert noise_strip(bare_audit()) is None
        assert shares(Round(taken_away=(), start=distance(0.1), factors=()), ()) is None


def luminance(colour: str) -> float:
    """Relative luminance of sRGB (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("letters", ["ink", "quiet", "bad", "good", "data"])
@pytest.mark.parametrize("behind", ["page", "box", "code"])
def test_letters_have_enough_contrast(colours, letters, behind):
    dark, light = sorted((luminance(colours[letters]), luminance(colours[behind])))
    assert (light + 0.05) / (dark + 0.05) >= 4.5
