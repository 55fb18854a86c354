"""The event files of the logger, read back."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2

from app.dashboard import DashboardLogger
from app.dashboard.layout import CHARTS
from app.metrics import MismatchMetrics
from tests.metrics.reference import make_rows

K3, LAYOUT = "rollout_correction/k3_kl", "custom_scalars__config__"


def read(logger: DashboardLogger) -> EventAccumulator:
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "scalars": 0})
    return events.Reload()


def test_scalars_are_plain_and_complete(tmp_path: Path) -> None:
    logger = DashboardLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({K3: step / 8, "epoch": step, "tensor": torch.tensor(2.0)}, step=step)
    events = read(logger)
    assert [(event.step, event.value) for event in events.Scalars(K3)] == [(0, 0.0), (1, 0.125), (2, 0.25)]
    assert [event.value for event in events.Scalars("tensor")] == [2.0] * 3
    assert set(events.Tags()["scalars"]) == {K3, "epoch", "tensor"}


def test_the_first_event_of_a_known_tag_describes_it(tmp_path: Path) -> None:
    """In a tensor: TensorBoard's fast loader drops the metadata of plain values."""
    logger = DashboardLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({K3: torch.tensor(0.5), "epoch": step}, step=step)
    logger.finalize("success")
    (path,) = Path(logger.log_dir).glob("events.*")
    values = [value for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    first = next(value for value in values if value.tag == K3)
    assert first.tensor.float_val == [0.5]
    assert first.metadata.plugin_data.plugin_name == "scalars"
    assert "**healthy:** ≤ 0.001" in first.metadata.summary_description
    described = [value.tag for value in values if value.metadata.summary_description]
    assert described == [K3]


def test_layout_is_written_once_and_first(tmp_path: Path) -> None:
    logger = DashboardLogger(tmp_path)
    logger.log_metrics({K3: 1.0}, step=1)
    logger.log_metrics({K3: 1.0}, step=2)
    logger.experiment.add_scalar("other", 1.0, 2)
    (event,) = read(logger).Tensors(LAYOUT)
    found = layout_pb2.Layout()
    found.ParseFromString(event.tensor_proto.string_val[0])
    assert sum(len(category.chart) for category in found.category) == len(CHARTS)


def test_each_run_folder_has_its_layout_and_descriptions(tmp_path: Path) -> None:
    for version in range(2):
        logger = DashboardLogger(tmp_path, name="run")
        logger.log_metrics({K3: 1.0}, step=1)
        events = read(logger)
        assert logger.version == version
        assert len(events.Tensors(LAYOUT)) == 1
        assert events.SummaryMetadata(K3).summary_description


def test_prefix(tmp_path: Path) -> None:
    logger = DashboardLogger(tmp_path, prefix="a")
    logger.log_metrics({K3: 1.0}, step=1)
    events = read(logger)
    assert len(events.Scalars(f"a-{K3}")) == 1
    assert events.SummaryMetadata(f"a-{K3}").summary_description


def test_what_lightning_takes_and_refuses_stays(tmp_path: Path) -> None:
    logger = DashboardLogger(tmp_path)
    logger.log_metrics({K3: {"a": 1.0}}, step=1)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="you tried to log"):
        logger.log_metrics({"policy/loss": "text"}, step=1)  # type: ignore[dict-item]
    logger.log_hyperparams({"lr": 1e-3})
    assert "hp_metric" in read(logger).Tags()["scalars"]
    assert Path(logger.log_dir, "hparams.yaml").read_text() == "lr: 0.001\n"


def test_histograms(tmp_path: Path) -> None:
    metrics = MismatchMetrics()
    old, rollout, mask = make_rows(seed=1)
    metrics.update(old, rollout, mask)
    logger = DashboardLogger(tmp_path)
    drawn = metrics.histograms()
    logger.log_histograms(drawn, step=5)
    events = read(logger)
    assert set(events.Tags()["histograms"]) == set(drawn)
    (event,) = events.Histograms("rollout_correction/log_ratio")
    assert event.step == 5
    assert event.histogram_value.num == mask.sum()
    assert event.histogram_value.bucket == list(drawn["rollout_correction/log_ratio"].counts)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with mock.patch.object(rank_zero_only, "rank", 1):
        logger = DashboardLogger(tmp_path)
        logger.log_metrics({K3: 1.0}, step=1)
        logger.log_histograms({}, step=1)
        logger.experiment.add_scalar("x", 1.0, 1)
    assert list(tmp_path.rglob("*")) == []
