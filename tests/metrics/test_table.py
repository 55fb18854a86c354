"""The table is complete, and everything derived from it covers it."""

from __future__ import annotations

import pytest
from torch.utils.tensorboard.summary import custom_scalars

from app.maths.correction import CorrectionConfig
from app.metrics import diagnose, table
from tests.metrics.reference import KEY
from tests.metrics.test_mismatch_metrics import inputs

ALL = {spec.key for spec in table.SPECS}


def test_keys_are_unique_and_all_can_be_produced() -> None:
    assert len(ALL) == len(table.SPECS)
    config = CorrectionConfig(level="token", control="mask", lower=0.5, upper=2.0, veto_low=1e-4)
    assert {key.removeprefix(KEY) for key in diagnose(**inputs(), config=config)} == ALL


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
        (table.Range(low=0.9), "≥ 0.9"),
        (table.Range(high=0.001), "≤ 0.001"),
        (table.Range(low=-0.1, high=0.1), "-0.1 … 0.1"),
    ],
)
def test_range_text(bounds: table.Range, text: str) -> None:
    assert str(bounds) == text


def test_markdown_has_a_row_of_seven_cells_for_each_metric() -> None:
    lines = table.markdown().splitlines()
    assert len(lines) == len(table.SPECS) + 2
    for line, spec in zip(lines[2:], table.SPECS, strict=True):
        assert line.replace("\\|", "").count("|") == 8
        assert line.startswith(f"| `{spec.key}` | ")


def test_dashboard_shows_every_metric_once() -> None:
    layout = table.tensorboard_layout()
    tags = [tag for charts in layout.values() for _, chart in charts.items() for tag in chart[1]]
    assert sorted(tags) == sorted(KEY + key for key in ALL)
    custom_scalars(layout)  # TensorBoard accepts it
