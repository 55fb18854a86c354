"""The Custom Scalars layout, matched the way TensorBoard matches it."""

from __future__ import annotations

import re

from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard.summary import custom_scalars

from app.dashboard.keys import ALL
from app.dashboard.layout import CHARTS, layout

INFOS = {info.key: info for info in ALL}
SAMPLES = {
    "mismatch_guard/<rule>": ["k3_kl_above_0.05"],
    "rollout_correction/abs_diff_at_position/<first>": ["000000", "000001", "131072"],
    "rollout/reward/<name>_mean": ["format", "maths_answer"],
    "rollout/reward/<name>_std": ["format", "maths_answer"],
    "val/<name>": ["format", "maths_answer"],
}
TAGS = [re.sub("<.*>", sample, info.key) for info in ALL for sample in (SAMPLES[info.key] if "<" in info.key else [""])]


def shown(kind: str, tags: list[str]) -> list[str]:
    """Tags that TensorBoard puts into a chart: `re.match` of the lines' expressions, a band's tags as they are."""
    return tags if kind == "Margin" else [tag for tag in TAGS if any(re.match(regex, tag) for regex in tags)]


def test_sections_in_reading_order() -> None:
    assert list(layout()) == ["mismatch", "correction", "dropped data", "policy", "reward", "time"]


def test_every_key_is_shown_in_the_section_of_its_group() -> None:
    seen: dict[str, set[str]] = {}
    for section, charts in layout().items():
        for kind, tags in charts.values():
            for tag in shown(kind, tags):
                seen.setdefault(tag, set()).add(section)
    assert seen.keys() == set(TAGS)
    for info in ALL:
        if "<" not in info.key:
            assert seen[info.key] == {info.group}, info.key


def test_a_chart_shows_its_own_keys_only() -> None:
    """No prefix or family takes more than was meant: kl is not kl_loss, val/<name> not val/completion_length."""
    for chart in CHARTS:
        kind, tags = layout()[INFOS[chart.keys[0]].group][chart.heading]
        meant = {tag for key in chart.keys for tag in TAGS if re.fullmatch(re.sub("<.*>", "[^/]+", key), tag)}
        if chart.title.startswith("validation reward"):
            meant -= {"val/completion_length", "val/truncated_fraction"}
        assert set(shown(kind, tags)) == meant, chart.title


def test_keys_of_a_chart_share_their_unit_and_group() -> None:
    for chart in CHARTS:
        assert len({(INFOS[key].unit, INFOS[key].group) for key in chart.keys}) == 1, chart.title


def test_headings_are_unique_and_say_what_is_healthy() -> None:
    headings = {chart.heading for chart in CHARTS}
    assert len(headings) == len(CHARTS)
    assert "KL(rollout ‖ train) by k3: look here first · nats · healthy ≤ 0.001" in headings
    assert "χ²(train ‖ rollout): tokens, rows · healthy: chi2_token ≤ 1" in headings
    assert "effective sample size · fraction · healthy ≥ 0.9" in headings


def test_bands_are_value_lower_upper() -> None:
    bands = {chart.title: chart.keys for chart in CHARTS if chart.band}
    assert bands["applied weight: min, mean, max"] == (
        "rollout_correction/is_weight_mean",
        "rollout_correction/is_weight_min",
        "rollout_correction/is_weight_max",
    )


def test_tensorboard_reads_it() -> None:
    summary = custom_scalars(layout())
    read = layout_pb2.Layout()
    read.ParseFromString(summary.value[0].tensor.string_val[0])
    assert sum(len(category.chart) for category in read.category) == len(CHARTS)
