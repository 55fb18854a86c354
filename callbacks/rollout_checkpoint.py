"""Checkpoints that fall between rollouts, and of which one is always whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast
from weakref import proxy

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from app.checkpoint.files import SaveError, reason, remove, remove_leftovers, set_link
from app.checkpoint.resolve import LAST, same_everywhere
from app.errors import LockstepError
from app.rollout.steps import TrainStep
from app.world import HasWorld, World


class RolloutCheckpoint(ModelCheckpoint):
    """Saves at the first rollout end `every_n_train_steps` after the last save, and at the last step of the run.

    A checkpoint inside a rollout must carry the rows of every rank; between rollouts it needs none. The last step is
    saved in `on_train_batch_end` too: later hooks count the epoch as done and the run could not go on inside it.

    Of a save the order is: write the new checkpoint, point `last.ckpt` to it, delete the oldest. At every moment
    `last.ckpt` is a link to a whole checkpoint.
    """

    world: World
    """The ranks that write together; the module's, from `setup` on."""

    def __init__(self, dirpath: str | None = None, every_n_train_steps: int = 50, save_top_k: int = 2) -> None:
        """Configure the saves.

        Args:
            dirpath: folder of the checkpoints; null: `checkpoints` in the run folder.
            every_n_train_steps: least number of optimiser steps between two saves.
            save_top_k: how many checkpoints to keep, the newest ones: 2, so that one is left if the newest is damaged
                later; -1 keeps all, 0 saves nothing.
        """
        super().__init__(
            dirpath=dirpath,
            filename="{step}",
            every_n_train_steps=every_n_train_steps,
            save_top_k=min(save_top_k, 1),  # Lightning knows more only with a value to rank them by
            save_last=None,  # it would move the link in two steps
            enable_version_counter=False,
        )
        self.save_top_k = save_top_k
        self.resume_from: str | None = None
        """The checkpoint this process found for --ckpt_path."""
        self._kept: list[str] = []  # names of this run's checkpoints, oldest first

    @property
    def state_key(self) -> str:
        """The same whatever the settings, so that a run with others still knows which checkpoints are there."""
        return type(self).__qualname__

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that all ranks go on from the same checkpoint, and clear away what a killed run left.

        Raises:
            LockstepError: if the ranks see different checkpoints.
        """
        if self.dirpath is None:  # Lightning would take a folder of the logger, which is another one each time
            self.dirpath = os.path.join(trainer.default_root_dir, "checkpoints")
        super().setup(trainer, pl_module, stage)
        self.world = cast(HasWorld, pl_module).world
        same_everywhere(self.resume_from, self.world)
        if stage == "fit" and trainer.is_global_zero:
            remove_leftovers(self._folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the checkpoint that the run goes on from, if it is one of this folder."""
        super().on_train_start(trainer, pl_module)
        start = trainer.ckpt_path
        if start is not None and Path(start).resolve().parent == self._folder.resolve():
            self._last_global_step_saved = trainer.global_step
            link = self._folder / LAST
            if trainer.is_global_zero and link.resolve() != Path(start).resolve():
                set_link(link, Path(start).resolve())  # or a crash before the next save would lead back to the other

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Save when it is time."""
        step = trainer.global_step
        due = batch.batch.ends_rollout and step - self._last_global_step_saved >= self._every_n_train_steps
        ends = step == trainer.max_steps or trainer.should_stop
        if (due or ends) and step != self._last_global_step_saved:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of a run that is limited by `max_epochs` or stopped by a validation."""
        ends = trainer.current_epoch + 1 == trainer.max_epochs or trainer.should_stop
        if ends and trainer.global_step != self._last_global_step_saved:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save now, unless this step is saved already. All ranks must call it together.

        Raises:
            LockstepError: on all ranks, if one of them cannot write; no half-written checkpoint has a name then.
        """
        if self.save_top_k == 0 or self._should_skip_saving_checkpoint(trainer):
            return
        path = Path(self.format_checkpoint_name(self._monitor_candidates(trainer)))
        kept = self._kept
        earlier = [name for name in kept if name != path.name]
        self._kept = [*earlier, path.name]  # before it is written, because it is part of what is written
        self.best_model_path, self.last_model_path = str(path), str(path.with_name(LAST))
        try:
            self._write(trainer, path)
        except SaveError as error:
            self._kept = kept
            whole = f"{earlier[-1]} is still whole" if earlier else "there is no earlier one"
            raise LockstepError(
                f"trainer.default_root_dir: cannot write {path}: {error}; {whole}. Fix that and go on "
                f"with --ckpt_path last"
            ) from error
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = str(path)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def state_dict(self) -> dict[str, Any]:
        """Lightning's state, and which checkpoints are there."""
        return {**super().state_dict(), "kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the checkpoints that are there, if they are in the same folder."""
        super().load_state_dict(state_dict)
        if state_dict["dirpath"] == self.dirpath:
            kept = state_dict.get("kept", [Path(state_dict["best_model_path"]).name])
            self._kept = [name for name in kept if (self._folder / name).exists()]

    def _write(self, trainer: Trainer, path: Path) -> None:
        """Write, link, delete. `trainer.save_checkpoint` ends in a barrier that a failed rank would not reach."""
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
        self.world.together(lambda: trainer.strategy.save_checkpoint(checkpoint, path), SaveError, reason=reason)
        keep = len(self._kept) if self.save_top_k == -1 else self.save_top_k
        old, self._kept = self._kept[:-keep], self._kept[-keep:]

        def tidy() -> None:
            if trainer.is_global_zero:
                set_link(path.with_name(LAST), path)
                for name in old:
                    remove(path.with_name(name))

        self.world.together(tidy, SaveError, reason=reason)

    @property
    def _folder(self) -> Path:
        return Path(os.fspath(self.dirpath or "."))
