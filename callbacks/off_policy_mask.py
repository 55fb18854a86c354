"""What the off-policy sequence mask dropped, and why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import PreTrainedTokenizerBase

from app.dashboard.row_table import named_tokens, row_text, write_table
from app.guards.dropped_rows import DroppedReport, DroppedRows
from app.guards.worst_rows import WorstRow
from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import TrainStep
from app.training.module import GRPOModule
from app.training.step_output import StepOutput


class OffPolicyMask(Callback):
    """Counts the dropped rows and writes the worst of them with their tokens, to TensorBoard and beside its files.

    The fractions are `rollout_correction/off_policy_sequence_fraction` and the same `_negative`. Active where
    `model.off_policy_sequence_mask_delta` is set.
    """

    def __init__(self, every_n_steps: int = 10, rows: int = 8) -> None:
        """Configure the log.

        Args:
            every_n_steps: optimiser steps between two reports, and the interval each report is of.
            rows: worst rows of a report; 0: numbers only.
        """
        if every_n_steps < 1:
            raise ValueError(f"off_policy_mask.every_n_steps={every_n_steps}: must be at least 1")
        if rows < 0:
            raise ValueError(f"off_policy_mask.rows={rows}: must not be negative")
        self.every_n_steps = every_n_steps
        self.rows = rows
        self._dropped: DroppedRows | None = None
        self._reported = 0
        self._at_step: DroppedReport | None = None  # at the end of the last optimiser step
        self._saved: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the processes that train together from the module."""
        assert isinstance(pl_module, GRPOModule)
        self._world = pl_module.world

    def state_dict(self) -> dict[str, Any]:
        """Every rank's rows since the last report, without those of a step under way: they come again."""
        return {"reports": self._world.gather(None if self._at_step is None else asdict(self._at_step))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; on another number of ranks the first one takes all rows."""
        self._saved = self._world.own_of([report for report in state_dict["reports"] if report is not None])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        assert isinstance(pl_module, GRPOModule)
        delta = pl_module.step_correction.off_policy_delta
        self._dropped = None if delta is None else DroppedRows(delta, self.rows)
        if self._dropped is not None:
            self._dropped.go_on(DroppedReport.merged([DroppedReport.of(saved) for saved in self._saved], self.rows))
        self._saved = []
        self._reported = self._step = trainer.global_step
        self._at_step = None if self._dropped is None else self._dropped.report
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked of every rank: it is broadcast

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Add a micro-batch, and report when it is time."""
        assert isinstance(pl_module, GRPOModule)
        if self._dropped is None:
            return
        done = trainer.global_step
        seen = cast(StepOutput, outputs)["corrected"].batch.off_policy
        assert seen is not None
        self._dropped.add(batch.batch, seen.keep, seen.drift, seen.difference, step=done, rank=trainer.global_rank)
        if done != self._reported and done % self.every_n_steps == 0:
            self._report(trainer, pl_module)
        if done != self._step:
            self._step, self._at_step = done, self._dropped.report

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what came after the last report."""
        assert isinstance(pl_module, GRPOModule)
        if self._dropped is not None and trainer.global_step != self._reported:
            self._report(trainer, pl_module)

    def _report(self, trainer: Trainer, pl_module: GRPOModule) -> None:
        assert self._dropped is not None
        self._reported = trainer.global_step
        reports = pl_module.world.gather(self._dropped.take())
        if trainer.is_global_zero:
            self._write(trainer, DroppedReport.merged(reports, self.rows), self._dropped.delta)

    def _write(self, trainer: Trainer, report: DroppedReport, delta: float) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(
                {
                    "off_policy_mask/dropped_rows": report.dropped,
                    "off_policy_mask/spared_rows": report.spared,
                    "off_policy_mask/drift_max": report.drift_max,
                },
                trainer.global_step,
            )
        if not report.worst:
            return
        datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
        table = [describe(row, delta, datamodule.tokenizer) for row in report.worst]
        heading = f"{report.dropped} of {report.rows} rows dropped, of {report.negative} with a negative advantage"
        path = self._folder / "off_policy_mask.csv"
        write_table(path, table, trainer.loggers, "off_policy_mask/worst_rows", trainer.global_step, heading)


def describe(row: WorstRow, delta: float, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a dropped row as a person would read it, by column."""
    return {
        "step": str(row.step),
        "rank": str(row.rank),
        "why": f"drift {row.score:.4g} > {delta:g} and advantage {row.row.advantage:.4g} < 0",
        "reward": f"{row.row.reward:.4g}",
        "tokens": str(row.row.sampled_count),
        "tokens that drifted most (nats)": named_tokens(row.row, row.differences, tokenizer, rank=float),
        **row_text(row.row, tokenizer),
    }
