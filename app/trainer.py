"""What the commands do, reachable from Python: a Trainer that reports what it trained, audits, exports and replays."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse.typing import PositiveInt
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from app.audit.command import subject_of, write_reports
from app.audit.gates import parse
from app.audit.progress import Progress
from app.audit.run import audit as audit_mismatch
from app.audit.sides.sampling import Mode
from app.checkpoint.files import check_writable
from app.checkpoint.resolve import LAST, resolve_checkpoint
from app.data.tokenizer import load_tokenizer
from app.errors import LockstepError
from app.guards.row_file import read_rows
from app.replay.replay import replay_rows
from app.replay.report import report
from app.rollout.datamodule import RolloutDataModule
from app.training.checks import check_data
from app.training.export import export_checkpoint
from app.training.module import GRPOModule
from app.training.restore import set_up
from callbacks.rollout_checkpoint import RolloutCheckpoint
from callbacks.run_summary import RunSummary, before_after_table
from callbacks.weight_sync import WeightSync


class LockstepTrainer(pl.Trainer):
    """A Trainer whose `fit` reports, and that can also audit, export, and replay the rows of a skipped step."""

    def fit(  # type: ignore[override]
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Check, validate, train, validate again, and write the summary if there is a RunSummary callback.

        Args:
            model: the GRPO module.
            train_dataloaders: the data module may stand here, too.
            val_dataloaders: not used.
            datamodule: prompts, rewards and engine.
            ckpt_path: a checkpoint file or DeepSpeed folder to go on from; `last`: the newest whole one of the run
                folder, if there is one; null: a new run.
            weights_only: not used: checkpoints hold plain values.

        Raises:
            LockstepError: if the settings contradict each other, or nothing was trained.
        """
        datamodule = train_dataloaders if datamodule is None else datamodule  # as Lightning takes it, too
        if not isinstance(model, GRPOModule) or not isinstance(datamodule, RolloutDataModule):
            raise LockstepError("fit(model, datamodule=...) needs a GRPOModule and a RolloutDataModule")
        ckpt_path = self._resolved(ckpt_path, start_anew=True)
        check_writable(Path(self.default_root_dir), "trainer.default_root_dir")
        datamodule.read_prompts(training=True)
        datamodule.plan(self.accumulate_grad_batches).check(self.world_size)
        check_data(datamodule, model.loss, model.run_control.correction)
        summary = next((each for each in self.callbacks if isinstance(each, RunSummary)), None)  # type: ignore[attr-defined]
        validates = summary is not None and datamodule.val_source is not None
        if ckpt_path is None and (last := self.checkpoint_folder / LAST).exists():
            rank_zero_warn(f"{last} of an earlier run will be replaced; to go on from it, add --ckpt_path last")
        if summary is not None and validates and ckpt_path is None:
            summary.before = self._scores(model, datamodule)
        super().fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
        if "update" not in model.timers.total:
            raise LockstepError(
                f"nothing was trained: the checkpoint is at step {self.global_step} and trainer.max_steps is "
                f"{self.max_steps}; raise it to go on"
            )
        if summary is not None:
            if validates:
                summary.after |= self._scores(model, datamodule)
            if self.is_global_zero:
                self._report(model, datamodule, summary)

    def validate(  # type: ignore[override]
        self,
        model: pl.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Sample the validation prompts with the weights of a checkpoint, and report the mean rewards.

        Args:
            model: the GRPO module.
            dataloaders: the data module may stand here, too.
            ckpt_path: a checkpoint file or DeepSpeed folder; `last`: the newest whole one of the run folder; null: the
                weights that the module has.
            verbose: whether the values are printed.
            datamodule: prompts, rewards and engine.
            weights_only: not used: checkpoints hold plain values.
        """
        path = self._resolved(ckpt_path, start_anew=False)
        return super().validate(model, dataloaders, ckpt_path=path, verbose=verbose, datamodule=datamodule)

    def test(  # type: ignore[override]
        self,
        model: pl.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Do what `validate` does, and report the values as those of a test; the arguments are the same."""
        path = self._resolved(ckpt_path, start_anew=False)
        return super().test(model, dataloaders, ckpt_path=path, verbose=verbose, datamodule=datamodule)

    @property
    def checkpoint_folder(self) -> Path:
        """Where the run's checkpoints are: where RolloutCheckpoint was told, else `checkpoints` in the run folder."""
        told = [each.dirpath for each in self.callbacks if isinstance(each, RolloutCheckpoint) and each.dirpath]  # type: ignore[attr-defined]
        return Path(told[0]) if told else Path(self.default_root_dir) / "checkpoints"

    def _resolved(self, ckpt_path: str | None, *, start_anew: bool) -> str | None:
        """The path of a whole checkpoint, which RolloutCheckpoint compares over the ranks; see `resolve_checkpoint`."""
        path = resolve_checkpoint(ckpt_path, self.checkpoint_folder, start_anew=start_anew)
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutCheckpoint):
                callback.resume_from = path
        return path

    def _scores(self, model: GRPOModule, datamodule: RolloutDataModule) -> dict[str, float]:
        return dict(self.validate(model, datamodule=datamodule, verbose=False)[0])

    def _report(self, model: GRPOModule, datamodule: RolloutDataModule, summary: RunSummary) -> None:
        """Write the summary and print what a person wants to know first."""
        folder = Path(self.default_root_dir)
        sync = next((each for each in self.callbacks if isinstance(each, WeightSync)), None)  # type: ignore[attr-defined]
        syncs = {} if sync is None else sync.record
        path = summary.write(
            folder,
            steps=self.global_step,
            seed=datamodule.seed,
            seconds=model.timers.total,
            syncs=syncs,
            settings={
                "correction": dataclasses.asdict(model.run_control.configured),
                "loss": {**dataclasses.asdict(model.loss), **dataclasses.asdict(model.loss.form)},
            },
        )
        print(f"\n{before_after_table(summary.before, summary.after)}\n")
        if syncs:
            canary = syncs["canary_abs_diff_mean"]
            found = "" if canary is None else f", last canary: mean |engine - trainer| = {canary:.1e} nats"
            print(f"weight syncs {syncs['count']}, verify={syncs['verify']}{found}")
        print(f"summary      {path}")
        if (checkpoint := self.checkpoint_folder / LAST).exists():
            print(f"checkpoint   {checkpoint}")
        print(f"dashboard    tensorboard --logdir {folder}")

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
        checkpoint = self._resolved(ckpt_path or "last", start_anew=False)
        folder = Path(out) if out else Path(self.default_root_dir) / "export"
        export_checkpoint(model, Path(str(checkpoint)), folder)
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
        checkpoint = self._resolved(ckpt_path, start_anew=False)
        set_up(model, None if checkpoint is None else Path(checkpoint))
        found = replay_rows(model, header, recorded, self.strategy.root_device)
        print(f"rows         {rows}\npolicy       {checkpoint or model.model_name_or_path}")
        print(report(found, model.loss_settings, load_tokenizer(model.model_name_or_path)))
        if not found.finite:
            sys.exit(1)

    def audit(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule,
        *,
        ckpt_path: str | None = None,
        out: str | None = None,
        mode: Mode = "quick",
        rows: PositiveInt | None = None,
        fail_above: str | None = None,
    ) -> None:
        """Find out whether, how much and why engine and trainer differ, on the same tokens with the same weights.

        Lets the configured engine sample, scores the same ids as training does, measures how far each side differs
        from itself, and takes away one factor at a time. Prints the finding and writes it to audit.html, audit.json and
        audit.txt. Exit status 1: a bound of --fail-above was broken, or the audit could not be done.

        Args:
            model: the GRPO module.
            datamodule: its prompts and its engine.
            ckpt_path: the weights: a checkpoint, or `last` for the newest one of the run folder; null: those of
                model.model_name_or_path.
            out: folder to write; null: `audit` in the run folder.
            mode: quick: about a thousand tokens, bigger changes are tried only where smaller ones explain nothing.
                thorough: ten thousand tokens, and every change that could matter.
            rows: completions to sample; null: as many as the mode needs.
            fail_above: largest values that pass, e.g. k3_kl=1e-3,logprob_abs_diff_max=0.5: diagnostics by their names
                on the dashboard, without prefix.
        """
        assert isinstance(model, GRPOModule)
        assert isinstance(datamodule, RolloutDataModule)
        bounds = {} if fail_above is None else parse(fail_above)
        folder = Path(out) if out else Path(self.default_root_dir) / "audit"
        check_writable(folder, "--out")
        checkpoint = self._resolved(ckpt_path, start_anew=False)
        found = audit_mismatch(
            subject_of(self, model, datamodule, checkpoint), mode=mode, rows=rows, bounds=bounds, progress=Progress()
        )
        write_reports(found, folder)
        if not all(gate.passed for gate in found.gates):
            sys.exit(1)
