"""Sampled completions on TensorBoard's text tab."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from app.dashboard.row_table import markdown_table
from app.rollout.steps import TrainStep
from app.types import Sample


class SampleLogger(Callback):
    """Writes a few completions with their rewards as a table, every so many optimiser steps."""

    def __init__(self, every_n_steps: int = 10, rows: int = 8) -> None:
        """Configure the table.

        Args:
            every_n_steps: optimiser steps between two tables; the first rollout is always shown.
            rows: completions of one table, spread over the groups; 0: no tables.
        """
        self.every_n_steps = every_n_steps
        self.rows = rows
        self._shown: int | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TrainStep, batch_idx: int
    ) -> None:
        """Write a table of a new rollout when it is time."""
        if batch.report is None or not self.rows:
            return
        if self._shown is not None and trainer.global_step - self._shown < self.every_n_steps:
            return
        self._shown = trainer.global_step
        samples = batch.report.samples
        rows = min(self.rows, len(samples))
        shown = [samples[i * len(samples) // rows] for i in range(rows)]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("rollout/samples", sample_table(shown), trainer.global_step)


def sample_table(samples: Sequence[Sample]) -> str:
    """Return the samples as a Markdown table: prompt, completion, every reward, how it finished."""
    names = list(samples[0].rewards) if samples else []
    rows = [
        [
            prompt_text(sample),
            sample.text,
            *("–" if (value := sample.rewards[name]) is None else f"{value:.3g}" for name in names),
            f"{sample.reward:.3g}",
            sample.completion.finish_reason,
        ]
        for sample in samples
    ]
    return markdown_table(["prompt", "completion", *names, "reward", "finish"], rows)


def prompt_text(sample: Sample) -> str:
    """Return the prompt as a person would read it: the text, or the chat's messages."""
    prompt = sample.prompt.prompt
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
