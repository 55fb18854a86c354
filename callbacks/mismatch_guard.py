"""Watches the mismatch, and acts when it has been too large for too long."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from app.dashboard.row_table import WORST_TOKENS, append_csv
from app.dashboard.text import markdown_table
from app.errors import LockstepError
from app.guards.learning_rate import scale_learning_rate
from app.guards.rules import Event, Guard, Rule
from app.guards.worst_rows import WorstRow, merged, worst_rows
from app.maths.correction import CorrectionConfig, preset
from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import TrainStep
from app.training.module import GRPOModule
from app.training.settings import CorrectionSettings
from app.types import TrainBatch
from callbacks.rollout_checkpoint import RolloutCheckpoint

NAME = "mismatch_guard"

DEFAULT_RULES = (
    Rule(metric="k3_kl", above=0.05, patience=3, recover=0.02),
    Rule(metric="ess", below=0.3, patience=5),
    Rule(metric="nonfinite_logprob_fraction", above=0.0, patience=1),
)
"""They only warn. k3_kl: fifty times the healthy limit, more than bfloat16 rollouts give; the others: their alarms."""

DEFAULT_CORRECTION = "swift/token_truncate"
"""Preset that `correct` switches on where the run has no correction of its own."""


class MismatchGuard(Callback):
    """Rules on logged values, each with patience: warn, log rows, switch the correction on, lower the rate, stop.

    Decisions are functions of the global values that are logged, so all ranks take the same ones without a word to each
    other. `correct` and `lower_learning_rate` are undone when the rule has recovered, unless it says `keep: true`.
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
        self._replacement: CorrectionConfig | None = None
        self._events: list[Event] = []  # not acted on yet
        self._micro_batches: list[tuple[TrainBatch, Tensor]] = []  # of the optimiser step under way
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse at the start what could not be done later.

        Raises:
            LockstepError: naming the key.
        """
        assert isinstance(pl_module, GRPOModule)
        if not self.guard.asks_for("correct"):
            return
        datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
        if not datamodule.engine.returns_logprobs:
            raise LockstepError(
                f"{NAME}.rules has the action correct, and {type(datamodule.engine).__name__} gives no "
                "log-probabilities"
            )
        try:
            self._replacement = replacement(pl_module, self._given)
        except ValueError as error:
            raise LockstepError(f"{NAME}.correction: {error}") from error

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint; the correction must be in force before the loader goes on inside a rollout."""
        assert isinstance(pl_module, GRPOModule)
        self.guard.load_state_dict(checkpoint.get(NAME, {}))
        self._ask_for_correction(pl_module)
        pl_module.take_up_correction()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the state. What is due to be logged is seen first, or the run that goes on would never see it."""
        assert isinstance(pl_module, GRPOModule)
        if NAME in pl_module.step_log.listeners:
            pl_module.log_if_due()
        checkpoint[NAME] = self.guard.state_dict()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch what is logged from now on."""
        assert isinstance(pl_module, GRPOModule)
        self._events, self._micro_batches, self._step = [], [], trainer.global_step
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked of every rank: it is broadcast
        if self.guard.rules:
            pl_module.step_log.listeners[NAME] = functools.partial(self._judge, trainer, pl_module)
            self._scale_learning_rate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Act on what the optimiser step made a rule do, before a checkpoint is written."""
        assert isinstance(pl_module, GRPOModule)
        if not self.guard.rules:
            return
        if self.guard.asks_for("log_rows"):
            self._micro_batches.append((batch.batch, outputs["old_logprobs"]))
        pl_module.log_if_due()
        events, self._events = self._events, []
        for event in events:
            self._act(trainer, pl_module, event)
        if trainer.global_step != self._step:
            self._step, self._micro_batches = trainer.global_step, []

    def _judge(
        self, trainer: Trainer, pl_module: GRPOModule, values: Mapping[str, float], step: int
    ) -> dict[str, float]:
        """Take in logged values; what follows for the correction and the learning rate follows at once."""
        self._events += self.guard.see(values, step)
        self._ask_for_correction(pl_module)
        self._scale_learning_rate(trainer)
        return {f"{NAME}/{label}": float(level) for label, level in self.guard.levels.items()}

    def _ask_for_correction(self, pl_module: GRPOModule) -> None:
        if self.guard.asks_for("correct"):
            pl_module.corrections.replacement = self._replacement if self.guard.corrects else None

    def _scale_learning_rate(self, trainer: Trainer) -> None:
        if self.guard.asks_for("lower_learning_rate"):
            schedule = cast(Any, trainer.lr_scheduler_configs[0].scheduler)
            scale_learning_rate(schedule, self.guard.learning_rate_scale)

    def _act(self, trainer: Trainer, pl_module: GRPOModule, event: Event) -> None:
        line = f"{event}{self._consequences(pl_module, event)}"
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(f"{NAME}/events", line, event.step)
        actions = event.rule.actions
        if not event.fired:
            if "warn" in actions:
                rank_zero_info(line)
            return
        if "warn" in actions:
            rank_zero_warn(f"{line}; look at {event.rule.key} on TensorBoard, and for what it means at app/README.md")
        if "log_rows" in actions:
            ranks = pl_module.world.gather(worst_rows(self._micro_batches, self.rows, trainer.global_rank))
            if trainer.is_global_zero:
                self._write(trainer, event, merged(ranks, self.rows))
        if "stop" in actions:
            pl_module.end_after_step(LockstepError(f"{event}; {_after_stop(trainer)}"))

    def _consequences(self, pl_module: GRPOModule, event: Event) -> str:
        """What the rule changed, in words."""
        said = ""
        if "correct" in event.rule.actions:
            assert self._replacement is not None
            state = "on" if self.guard.corrects else "off again"
            waits = ", from the next rollout on" if pl_module.corrections.pending else ""
            said += f"; its correction ({_in_words(self._replacement)}) is {state}{waits}"
        if "lower_learning_rate" in event.rule.actions:
            said += f"; the learning rate is now {self.guard.learning_rate_scale:g} of the scheduled one"
        if "log_rows" in event.rule.actions and event.fired:
            said += f"; the rows that differ most are in {self._rows_file}"
        return said

    @property
    def _rows_file(self) -> Path:
        return self._folder / f"{NAME}_rows.csv"

    def _write(self, trainer: Trainer, event: Event, rows: list[WorstRow]) -> None:
        datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
        if not rows:
            return
        table = [describe(row, event, datamodule.tokenizer) for row in rows]
        path = self._rows_file
        try:
            append_csv(path, table)
        except OSError as error:  # a full disk should not end the run for a table
            rank_zero_warn(f"{path}: cannot write ({error.strerror}); rows are lost")
        text = markdown_table(list(table[0]), [list(row.values()) for row in table])
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(f"{NAME}/worst_rows", text, event.step)


def replacement(pl_module: GRPOModule, given: CorrectionConfig | None) -> CorrectionConfig:
    """Return what `correct` switches to, as it may be asked for.

    Args:
        pl_module: with the run's own correction.
        given: asked for by the configuration.

    Raises:
        ValueError: if it changes nothing, or contradicts the loss.
    """
    own = pl_module.corrections.configured
    if given is None:
        if pl_module.corrections.offer(own).changes_gradients:
            raise ValueError(
                "model.correction corrects already; say what the action correct should switch to, or set "
                "model.correction.log_only to true"
            )
        without = dataclasses.replace(own, log_only=False)
        given = without if pl_module.corrections.offer(without).changes_gradients else preset(DEFAULT_CORRECTION)
    if given == own or not pl_module.corrections.offer(given).changes_gradients:
        raise ValueError("it corrects no other than model.correction does; set its preset or level")
    return given


def _in_words(config: CorrectionConfig) -> str:
    """What a correction has otherwise than one that only measures, e.g. "level token, upper 2.0"."""
    every = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    changed = {name: value for name, (value, default) in every.items() if value != default}
    if (rules := changed.pop("rejection", None)) is not None:
        changed["rejection rules"] = len(rules)
    return ", ".join(f"{name} {value}" for name, value in changed.items())


def describe(row: WorstRow, event: Event, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a row as a person would read it, by column."""
    tokens = row.row
    old, rollout = tokens.old_logprobs or (), tokens.rollout_logprobs or ()
    gaps = sorted(
        zip((a - b for a, b in zip(old, rollout, strict=True)), tokens.completion_ids, strict=True), key=_size
    )
    named = ", ".join(f"{tokenizer.decode([token])!r} {gap:+.3g}" for gap, token in gaps[:WORST_TOKENS])
    return {
        "step": str(event.step),
        "rule": event.rule.label,
        "rank": str(row.rank),
        "mean |old - rollout| (nats)": f"{row.mean_abs_diff:.4g}",
        "advantage": f"{tokens.advantage:.4g}",
        "reward": f"{tokens.reward:.4g}",
        "tokens": str(len(tokens.completion_ids)),
        "tokens that differ most (old - rollout, nats)": named,
        "prompt": str(tokenizer.decode(list(tokens.prompt_ids))),
        "completion": str(tokenizer.decode(list(tokens.completion_ids))),
    }


def _size(gap: tuple[float, int]) -> float:
    """Sorts the largest gaps to the front and missing ones (NaN) to the end."""
    return -abs(gap[0]) if gap[0] == gap[0] else 0.0


def _after_stop(trainer: Trainer) -> str:
    saves = any(isinstance(c, RolloutCheckpoint) and c.save_top_k != 0 for c in trainer.callbacks)  # type: ignore[attr-defined]
    if not saves:
        return "the run ends; nothing is saved (trainer.enable_checkpointing=false or checkpoint.save_top_k=0)"
    return "the run is saved and ends; find the cause (app/README.md), then go on with --ckpt_path last"
