"""A Trainer with Lockstep's own commands."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl

from app.checkpoint.resolve import resolve_checkpoint
from app.data.tokenizer import load_tokenizer
from app.training.export import export_checkpoint
from app.training.module import GRPOModule
from app.training.nonfinite import settings_of
from app.training.replay import replay_rows, set_up
from app.training.replay_report import report
from app.training.row_file import read_rows


class LockstepTrainer(pl.Trainer):
    """A Trainer that can also export, and replay the rows of a skipped step."""

    def export(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        out: str | None = None,
    ) -> None:
        """Write a checkpoint's policy as a Hugging Face folder.

        Args:
            model: the GRPO module.
            datamodule: not used.
            ckpt_path: a checkpoint file or DeepSpeed folder; `last` or null: the newest one of the run folder.
            out: folder to write; null: `export` in the run folder.
        """
        assert isinstance(model, GRPOModule)
        run_folder = Path(self.default_root_dir)
        checkpoint = resolve_checkpoint(ckpt_path or "last", run_folder / "checkpoints", start_anew=False)
        folder = export_checkpoint(model, Path(str(checkpoint)), Path(out) if out else run_folder / "export")
        print(f"exported {checkpoint} to {folder}")

    def replay(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        *,
        rows: str,
        ckpt_path: str | None = None,
    ) -> None:
        """Compute the rows of a skipped optimiser step again, one by one, in float32, without an engine.

        Prints for each row its loss, gradient norm and the first value that is not finite, by token and by module, and
        a verdict. Exit status 0: all was finite; 1: something was not, or the replay could not be done.

        Args:
            model: the GRPO module; settings that differ from those of the step are listed.
            datamodule: not used.
            rows: a file of `non_finite` in the run folder.
            ckpt_path: the weights: a checkpoint, or `last` for the newest one of the run folder; null: those of
                model.model_name_or_path.
        """
        assert isinstance(model, GRPOModule)
        header, recorded = read_rows(Path(rows))
        folder = Path(self.default_root_dir) / "checkpoints"
        checkpoint = resolve_checkpoint(ckpt_path, folder, start_anew=False)
        set_up(model, None if checkpoint is None else Path(checkpoint))
        found = replay_rows(model, header, recorded, self.strategy.root_device)
        print(f"rows         {rows}\npolicy       {checkpoint or model.model_name_or_path}")
        print(report(found, settings_of(model), load_tokenizer(model.model_name_or_path)))
        if not found.finite:
            sys.exit(1)
