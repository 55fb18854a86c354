"""Whole or not at all: full disks, read-only folders, links, and kill -9 at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.checkpoint.files import (
    SaveError,
    give_name,
    reason,
    remove,
    remove_leftovers,
    set_link,
    unfinished,
    write_durably,
    write_file,
)
from app.checkpoint.integrity import fault
from app.checkpoint.resolve import find_last
from app.world import World
from tests.checkpoint.folders import put_file, put_folder
from tests.threads import on_two_threads


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 4000 bytes, as on a full disk. No fixture: pytest writes its report inside those."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_what_does_not_fit_leaves_nothing_behind_and_the_old_file_as_it_was(tmp_path):
    write_file({"w": torch.zeros(10)}, tmp_path / "a.ckpt")
    with small_files(), pytest.raises(SaveError, match=r"^File too large$"):
        write_file({"w": torch.ones(100_000)}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["w"], torch.zeros(10))


def test_a_folder_that_cannot_be_written_is_named_by_the_systems_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"Not a directory|File exists"):
        write_file({}, tmp_path / "file" / "a.ckpt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named_by_the_systems_reason(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SaveError, match="Permission denied"):
        write_file({}, tmp_path / "a.ckpt")
    tmp_path.chmod(0o700)


def test_the_link_moves_in_one_step_and_stays_relative(tmp_path):
    link = tmp_path / "last.ckpt"
    for name in ("step=1.ckpt", "step=2.ckpt"):
        put_file(tmp_path / name)
        set_link(link, tmp_path / name)
        assert os.readlink(link) == name
    link.unlink()
    put_folder(link)  # what a copy makes of the link to a folder
    set_link(link, tmp_path / "step=2.ckpt")
    assert os.readlink(link) == "step=2.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]


def test_a_folder_replaces_another_of_its_name(tmp_path):
    path = put_folder(tmp_path / "step=1.ckpt")
    put_folder(unfinished(path))
    (unfinished(path) / "new").touch()
    give_name(path)
    assert (path / "new").exists()
    write_file({"w": torch.zeros(10)}, path)  # as after a change of the strategy
    assert path.is_file()
    put_folder(unfinished(path))
    give_name(path)
    assert path.is_dir()
    assert os.listdir(tmp_path) == ["step=1.ckpt"]


def test_leftovers_go_and_the_rest_stays(tmp_path):
    put_file(tmp_path / "step=1.ckpt")
    put_file(tmp_path / ".step=2.ckpt.tmp")
    put_folder(tmp_path / ".step=3.ckpt.tmp")
    put_folder(tmp_path / ".step=1.ckpt.old")
    put_folder(tmp_path / ".step=0.ckpt.old")  # the only one of its name
    (tmp_path / ".notes").touch()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".notes", "step=0.ckpt", "step=1.ckpt"]
    remove(tmp_path / "step=0.ckpt")
    remove(tmp_path / "step=0.ckpt")
    assert sorted(os.listdir(tmp_path)) == [".notes", "step=1.ckpt"]


@pytest.mark.parametrize("failed", [0, 1])
def test_all_ranks_raise_what_one_of_them_met(failed):
    def save(world: World) -> None:
        def action() -> None:
            if world.rank == failed:
                raise OSError(28, "No space left on device")

        world.together(action, SaveError, reason=reason)

    for error in on_two_threads(save):
        assert isinstance(error, SaveError)
        assert str(error) == f"No space left on device (rank {failed})"


def save_without_a_pause(folder: Path, kind: str, step: int, reports: int) -> None:
    """What a run does to its folder; steps come again, so that old checkpoints are also replaced."""
    remove_leftovers(folder)
    while True:
        step += 1
        path = folder / f"step={step % 5}.ckpt"
        value = torch.full((50_000,), float(step))
        if kind == "file":
            write_file({"state_dict": {"w": value}}, path)
        else:
            inner = unfinished(path) / "checkpoint"
            inner.mkdir(parents=True)
            write_durably({"dp_world_size": 1}, inner / "mp_rank_00_model_states.pt")
            write_durably({"w": value}, inner / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
            (inner.parent / "latest").write_text("checkpoint")
            give_name(path)
        set_link(folder / "last.ckpt", path)
        os.write(reports, f"{step} ".encode())
        if step % 5 != 3:  # now and then one is left, and replaced by the next of its name
            remove(folder / f"step={(step - 2) % 5}.ckpt")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_kill_at_any_moment_leaves_a_checkpoint_that_loads_and_none_half_written(tmp_path, kind):
    """40 kills at random moments (fixed seed) of a process that saves, links and deletes."""
    if kind == "folder":
        pytest.importorskip("deepspeed")
    moments = random.Random(7)
    step = 0
    for _ in range(40):
        reports, end = os.pipe()
        child = os.fork()  # a new interpreter would take seconds
        if child == 0:
            with contextlib.suppress(BaseException):
                save_without_a_pause(tmp_path, kind, step, end)
            os._exit(1)
        os.close(end)
        first = os.read(reports, 100)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it failed by itself"
        step = int((first + os.read(reports, 10_000)).split()[-1])
        os.close(reports)
        for path in tmp_path.glob("*.ckpt"):
            assert path.is_symlink() or fault(path) is None, "a half-written one has a name"
        last = find_last(tmp_path)
        assert last is not None
        part = last / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt" if kind == "folder" else last
        loaded = torch.load(part)
        value = (loaded if kind == "folder" else loaded["state_dict"])["w"]
        assert value.unique().tolist() in ([step], [step + 1.0])  # the last that was reported, or a newer one
