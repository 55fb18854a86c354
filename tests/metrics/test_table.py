"""The table is complete, and everything derived from it covers it."""

from __future__ import annotations

import pytest

from app.maths.correction import CorrectionConfig
from app.metrics import diagnose, table
from app.metrics.spec import Range
from tests.metrics.reference import KEY
from tests.metrics.test_mismatch_metrics import inputs

ALL = {spec.key for spec in table.SPECS}


def test_keys_are_unique_and_all_can_be_produced() -> None:
    assert len(ALL) == len(table.SPECS)
    config = CorrectionConfig(level="token", control="mask", lower=0.5, upper=2.0, veto_low=1e-4)
    found = {key.removeprefix(KEY) for key in diagnose(**inputs(), config=config)}
    assert {key for key in found if "at_position" not in key} == ALL


def test_ranges() -> None:
    healthy = {spec.key: spec.healthy for spec in table.SPECS if spec.healthy is not None}
    assert 9e-4 in healthy["k3_kl"]
    assert 2e-3 not in healthy["k3_kl"]
    assert -0.2 not in healthy["kl"]
    assert 0.95 in healthy["ess"]
    assert 0.98 not in healthy["prob_pearson"]
    alarms = {spec.key: spec.tolerable for spec in table.SPECS if spec.tolerable is not None}
    assert 0.5 in alarms["ess"]
    assert 0.2 not in alarms["ess"]


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Range(low=0.9), "≥ 0.9"),
        (Range(high=0.001), "≤ 0.001"),
        (Range(low=-0.1, high=0.1), "-0.1 … 0.1"),
    ],
)
def test_range_text(bounds: Range, text: str) -> None:
    assert str(bounds) == text


def test_markdown_has_a_row_of_eight_cells_for_each_metric() -> None:
    lines = table.markdown().splitlines()
    assert lines[0] == "| key | definition | unit | better | mean over | healthy | alarm | when |"
    assert len(lines) == len(table.DOCUMENTED) + 2
    for line, info in zip(lines[2:], table.DOCUMENTED, strict=True):
        assert line.replace("\\|", "").count("|") == 9
        assert line.startswith(f"| `{info.key}` | ")
        assert line.endswith(f" | {info.when} |")
