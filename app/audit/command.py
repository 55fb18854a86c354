"""`python -m app audit`: what to audit, from the Trainer's settings, and the report files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from transformers.utils import logging

from app.audit.report.html import page
from app.audit.report.json import to_json
from app.audit.report.text import terminal
from app.audit.run import Subject
from app.audit.types import Audit
from app.checkpoint.files import reason
from app.errors import LockstepError
from app.policy.loading import MIXED_PRECISION
from app.rollout.datamodule import RolloutDataModule
from app.training.module import GRPOModule
from app.training.restore import set_up


def subject_of(
    trainer: pl.Trainer, module: GRPOModule, datamodule: RolloutDataModule, checkpoint: str | Path | None
) -> Subject:
    """Return what to audit, with prompts and weights loaded.

    Raises:
        LockstepError: if there are no prompts, sampling is greedy, or the checkpoint belongs to another model.
    """
    if not datamodule.sampling.temperature > 0:
        raise LockstepError(
            f"data.sampling.temperature={datamodule.sampling.temperature:g}: greedy samples have no log-probabilities "
            f"to compare; audit at a temperature above 0"
        )
    if datamodule.train_source is None and datamodule.val_source is None:
        raise LockstepError("no prompts to audit with: give --prompts FILE, or data.train in a configuration")
    logging.disable_progress_bar()  # the audit has its own
    datamodule.read_prompts(training=datamodule.train_source is not None)
    set_up(module, None if checkpoint is None else Path(checkpoint))
    strategy: Any = trainer.strategy
    return Subject(
        module=module,
        datamodule=datamodule,
        checkpoint=None if checkpoint is None else str(checkpoint),
        autocast=trainer.precision_plugin.forward_context,
        compute_dtype=MIXED_PRECISION.get(str(trainer.precision), module.dtype_name),
        device=strategy.root_device,
    )


def write_reports(found: Audit, folder: Path) -> None:
    """Print the findings, and write them to `folder` as text, JSON and HTML.

    Raises:
        LockstepError: if the folder cannot be written.
    """
    text = terminal(found)
    print(f"\n{text}\n")
    try:
        for name, content in (("txt", text + "\n"), ("json", to_json(found)), ("html", page(found))):
            (folder / f"audit.{name}").write_text(content, encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"--out: cannot write {folder}: {reason(error)}") from error
    print(f"page         {folder / 'audit.html'}\nnumbers      {folder / 'audit.json'}")
