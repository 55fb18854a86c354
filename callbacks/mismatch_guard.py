"""Watches the mismatch, and acts when it has been too large for too long."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from app.dashboard.row_table import add_text, named_tokens, row_text, write_table
from app.errors import LockstepError
from app.guards.mismatch_guard import NAME, Event, Guard
from app.guards.rules import Rule
from app.guards.worst_rows import WorstRow, furthest_from_rollout, worst_of
from app.maths.correction import CorrectionConfig
from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import TrainStep
from app.training.module import GRPOModule
from app.training.settings import CorrectionSettings
from app.training.step_output import StepOutput
from app.types import TrainBatch
from callbacks.rollout_checkpoint import RolloutCheckpoint

DEFAULT_RULES = (
    Rule(metric="k3_kl", above=0.05, patience=3, recover=0.02),
    Rule(metric="ess", below=0.3, patience=5),
    Rule(metric="nonfinite_logprob_fraction", above=0.0, patience=1),
)
"""They only warn. k3_kl: fifty times the healthy limit, more than bfloat16 rollouts give; the others: their alarms."""


class MismatchGuard(Callback):
    """Rules on logged values, each with patience: warn, log rows, switch the correction on, lower the rate, stop.

    The guard itself is a watcher of the module's RunControl, which applies what it asks for; this callback makes it and
    reports what happened. Decisions are functions of the global values that are logged, so all ranks take the same ones
    without a word to each other. `correct` and `lower_learning_rate` are undone when the rule has recovered, unless it
    says `keep: true`.
    """

    def __init__(
        self,
        rules: tuple[Rule, ...] = DEFAULT_RULES,
        correction: CorrectionSettings | None = None,
        learning_rate_factor: float = 0.5,
        learning_rate_floor: float = 0.1,
        rows: int = 8,
    ) -> None:
        """Configure the guard.

        Args:
            rules: what is watched and done; []: nothing.
            correction: what the action `correct` switches to; null: the run's own correction without `log_only`, or
                swift/token_truncate where it has none.
            learning_rate_factor: each firing of a rule with `lower_learning_rate` multiplies the scheduled learning
                rate by it.
            learning_rate_floor: the least share of the scheduled rate that is left.
            rows: worst rows that `log_rows` writes.
        """
        if rows < 1:
            raise ValueError(f"{NAME}.rows={rows}: must be at least 1")
        self.guard = Guard(rules, learning_rate_factor, learning_rate_floor)
        if correction is not None and not self.guard.asks_for("correct"):
            raise ValueError(f"{NAME}.correction does nothing without a rule that has the action correct")
        self.rows = rows
        self._given = None if correction is None else correction.resolve()
        self._micro_batches: list[tuple[TrainBatch, Tensor]] = []  # of the optimiser step under way
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the guard to the run's control; refuse at the start what could not be done later.

        Raises:
            LockstepError: naming the key.
        """
        assert isinstance(pl_module, GRPOModule)
        if not self.guard.rules:
            return
        datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
        if self.guard.asks_for("correct") and not datamodule.engine.returns_logprobs:
            raise LockstepError(
                f"{NAME}.rules has the action correct, and {type(datamodule.engine).__name__} gives no "
                "log-probabilities"
            )
        try:
            self.guard.prepare(pl_module.run_control.configured, self._given, _after_stop(trainer))
        except ValueError as error:
            raise LockstepError(f"{NAME}.correction: {error}") from error
        pl_module.run_control.watch(self.guard)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with no rows of a step under way."""
        self._micro_batches, self._step = [], trainer.global_step
        self.guard.take_events()  # of an earlier run
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked of every rank: it is broadcast

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Report what the optimiser step made a rule do, before a checkpoint is written."""
        assert isinstance(pl_module, GRPOModule)
        if self.guard.asks_for("log_rows"):
            self._micro_batches.append((batch.batch, cast(StepOutput, outputs)["corrected"].batch.old_logprobs))
        for event in self.guard.take_events():
            self._report(trainer, pl_module, event)
        if trainer.global_step != self._step:
            self._step, self._micro_batches = trainer.global_step, []

    def _report(self, trainer: Trainer, pl_module: GRPOModule, event: Event) -> None:
        line = f"{event}{self._consequences(pl_module, event)}"
        add_text(trainer.loggers, f"{NAME}/events", line, event.step)
        actions = event.rule.actions
        if not event.fired:
            if "warn" in actions:
                rank_zero_info(line)
            return
        if "warn" in actions:
            rank_zero_warn(f"{line}; look at {event.rule.key} on TensorBoard, and for what it means at app/README.md")
        if "log_rows" in actions:
            own = furthest_from_rollout(self._micro_batches, self.rows, step=event.step, rank=trainer.global_rank)
            rows = worst_of(pl_module.world.gather(own), self.rows)
            if trainer.is_global_zero and rows:
                datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
                table = [describe(row, event, datamodule.tokenizer) for row in rows]
                write_table(self._rows_file, table, trainer.loggers, f"{NAME}/worst_rows", event.step)

    def _consequences(self, pl_module: GRPOModule, event: Event) -> str:
        """What the rule changed, in words."""
        said = ""
        if "correct" in event.rule.actions:
            assert self.guard.replacement is not None
            state = "on" if self.guard.corrects else "off again"
            waits = ", from the next rollout on" if pl_module.run_control.pending else ""
            said += f"; its correction ({_in_words(self.guard.replacement)}) is {state}{waits}"
        if "lower_learning_rate" in event.rule.actions:
            said += f"; the learning rate is now {self.guard.learning_rate_scale:g} of the scheduled one"
        if "log_rows" in event.rule.actions and event.fired:
            said += f"; the rows that differ most are in {self._rows_file}"
        return said

    @property
    def _rows_file(self) -> Path:
        return self._folder / f"{NAME}_rows.csv"


def _in_words(config: CorrectionConfig) -> str:
    """What a correction has otherwise than one that only measures, e.g. "level token, upper 2.0"."""
    every = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    changed = {name: value for name, (value, default) in every.items() if value != default}
    if (rules := changed.pop("rejection", None)) is not None:
        changed["rejection rules"] = len(rules)
    return ", ".join(f"{name} {value}" for name, value in changed.items())


def describe(row: WorstRow, event: Event, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a row as a person would read it, by column."""
    return {
        "step": str(row.step),
        "rule": event.rule.label,
        "rank": str(row.rank),
        "mean |old - rollout| (nats)": f"{row.score:.4g}",
        "advantage": f"{row.row.advantage:.4g}",
        "reward": f"{row.row.reward:.4g}",
        "tokens": str(row.row.sampled_count),
        "tokens that differ most (old - rollout, nats)": named_tokens(row.row, row.differences, tokenizer),
        **row_text(row.row, tokenizer),
    }


def _after_stop(trainer: Trainer) -> str:
    saves = any(isinstance(c, RolloutCheckpoint) and c.save_top_k != 0 for c in trainer.callbacks)  # type: ignore[attr-defined]
    if not saves:
        return "the run ends; nothing is saved (trainer.enable_checkpointing=false or checkpoint.save_top_k=0)"
    return "the run is saved and ends; find the cause (app/README.md), then go on with --ckpt_path last"
