"""What the callback keeps, links and deletes, with a real Trainer; and what it says if it cannot save."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from app.checkpoint import files
from app.checkpoint.resolve import find_last
from app.checkpoint.torch_io import AtomicCheckpointIO
from app.errors import LockstepError
from app.world import World
from callbacks.rollout_checkpoint import RolloutCheckpoint


class Batch(dict):
    """A batch of one number; every one ends a rollout."""

    ends_rollout = True

    @property
    def batch(self):
        return self


class Numbers:
    """Ten of them."""

    def __len__(self):
        return 10

    def __iter__(self):
        return (Batch(x=torch.tensor([float(i)])) for i in range(10))


class Line(pl.LightningModule):
    def __init__(self, width=1):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(width))
        self.world = World()

    def training_step(self, batch, batch_idx):
        return ((self.w - batch["x"]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(folder: Path, steps: int, ckpt_path=None, width=1, **settings) -> RolloutCheckpoint:
    callback = RolloutCheckpoint(dirpath=str(folder), **{"every_n_train_steps": 1, **settings})
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=folder,
    )
    trainer.fit(Line(width), Numbers(), ckpt_path=ckpt_path)
    return callback


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (-1, [1, 2, 3, 4]), (0, [])], ids=str
)
def test_the_newest_are_kept_and_the_link_points_to_the_last(tmp_path, keep, left):
    train(tmp_path, 4, save_top_k=keep)
    assert names(tmp_path) == (["last.ckpt"] if left else []) + [f"step={step}.ckpt" for step in left]
    if left:
        assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"


def test_at_every_moment_of_a_save_the_link_points_to_a_whole_checkpoint(tmp_path, monkeypatch):
    """Before each of the system calls that change a name."""
    train(tmp_path, 2, save_top_k=1)
    calls: list[str] = []

    def watched(name):
        original = getattr(os, name)

        def call(*args):
            calls.append(name)
            assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] >= 2
            return original(*args)

        monkeypatch.setattr(files.os, name, call)

    for name in ("replace", "rename", "symlink"):
        watched(name)
    train(tmp_path, 5, ckpt_path=str(tmp_path / "step=2.ckpt"), save_top_k=1)
    assert calls == ["replace", "symlink", "replace", "rename"] * 3  # write, flip, delete
    assert names(tmp_path) == ["last.ckpt", "step=5.ckpt"]


def test_a_resumed_run_counts_on_and_tidies_what_it_left(tmp_path):
    train(tmp_path, 3, every_n_train_steps=3)
    assert names(tmp_path) == ["last.ckpt", "step=3.ckpt"]
    (tmp_path / ".step=9.ckpt.tmp").touch()
    resumed = train(tmp_path, 7, ckpt_path=str(tmp_path / "last.ckpt"), every_n_train_steps=3)
    # 6 is three steps after 3, 7 is the end; 4 would be the first if it had forgotten that 3 is saved
    assert names(tmp_path) == ["last.ckpt", "step=6.ckpt", "step=7.ckpt"]
    assert resumed.best_model_path == str(tmp_path / "step=7.ckpt")


def test_another_runs_checkpoints_are_not_deleted(tmp_path):
    train(tmp_path / "a", 2)
    train(tmp_path / "b", 3)
    with pytest.warns(UserWarning, match="dirpath has changed"):
        train(tmp_path / "b", 5, ckpt_path=str(tmp_path / "a" / "step=2.ckpt"), save_top_k=1)
    assert names(tmp_path / "a") == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]
    assert names(tmp_path / "b") == ["last.ckpt", "step=2.ckpt", "step=5.ckpt"]  # 3 was written anew, and tidied


def test_save_now_saves_a_step_once(tmp_path):
    class SaveNow(pl.Callback):
        written: list[int] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            callback = trainer.checkpoint_callback
            for _ in range(2):
                before = callback._last_global_step_saved
                callback.save(trainer)
                if callback._last_global_step_saved != before:
                    self.written.append(trainer.global_step)

    callback = RolloutCheckpoint(dirpath=str(tmp_path), every_n_train_steps=100, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SaveNow(), callback],
    )
    trainer.fit(Line(), Numbers())
    assert SaveNow.written == [1, 2, 3]
    assert names(tmp_path) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]


def test_a_full_disk_ends_in_one_line_and_leaves_the_earlier_checkpoint(tmp_path):
    train(tmp_path, 2, width=5000)
    size = (tmp_path / "step=2.ckpt").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        with pytest.raises(LockstepError) as error:
            train(tmp_path, 5, ckpt_path=str(tmp_path / "step=2.ckpt"), width=5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert str(error.value) == (
        f"trainer.default_root_dir: cannot write {tmp_path / 'step=3.ckpt'}: File too large; step=2.ckpt is still "
        "whole. Fix that and go on with --ckpt_path last"
    )
    assert names(tmp_path) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]
    assert find_last(tmp_path) == tmp_path / "step=2.ckpt"
    train(tmp_path, 4, ckpt_path=str(find_last(tmp_path)), width=5000)
    assert names(tmp_path) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
