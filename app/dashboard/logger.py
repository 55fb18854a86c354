"""A TensorBoardLogger that brings its own dashboard: the layout, and what every key means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import scalar

from app.dashboard.keys import describe, find
from app.dashboard.layout import layout
from app.metrics.drawing import Histogram


class DashboardLogger(TensorBoardLogger):
    """Lightning's TensorBoardLogger, with the Custom Scalars layout, a description on each scalar's card, histograms.

    The arguments are those of `lightning.pytorch.loggers.TensorBoardLogger`; all it does stays as it is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `lightning.pytorch.loggers.TensorBoardLogger`."""
        super().__init__(*args, **kwargs)
        self._described: set[str] = set()

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer; the layout is the first that it writes."""
        if self._experiment is None:
            super().experiment.add_custom_scalars(layout())
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars, and the description of each tag before its first value."""
        for name in metrics:
            self._describe(name, metrics[name], step)
        super().log_metrics(metrics, step)

    @rank_zero_only
    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Write histograms, as `MismatchMetrics.histograms` returns them."""
        for name, drawn in histograms.items():
            self.experiment.add_histogram_raw(
                self._tag(name),
                min=drawn.minimum,
                max=drawn.maximum,
                num=drawn.total,
                sum=drawn.sum,
                sum_squares=drawn.sum_squares,
                bucket_limits=list(drawn.limits),
                bucket_counts=list(drawn.counts),
                global_step=step,
            )

    def _describe(self, name: str, value: Any, step: int | None) -> None:
        """Write the description of a key that a table knows, once for each tag.

        TensorBoard takes it from the first event of a tag, and its fast loader only if the value there is a tensor,
        while whoever reads the file's scalars (`EventAccumulator.Scalars`) sees no tensors. So the first value is
        written twice: here, and as the plain scalar that all others are; the two points lie on each other.
        """
        tag = self._tag(name)
        info = None if tag in self._described or isinstance(value, dict | str) else find(name)
        if info is None:
            return
        self._described.add(tag)
        summary = scalar(tag, value, new_style=True)
        summary.value[0].metadata.summary_description = describe(info)
        self.experiment._get_file_writer().add_summary(summary, step)

    def _tag(self, name: str) -> str:
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name
