"""Which checkpoint `--ckpt_path` means, and what is said of broken ones."""

from __future__ import annotations

import os

import pytest

from app.checkpoint.files import replaced
from app.checkpoint.integrity import fault
from app.checkpoint.resolve import find_last, resolve_checkpoint, same_everywhere
from app.errors import LockstepError
from app.world import World
from tests.checkpoint.folders import cut, put_file, put_folder


@pytest.fixture
def run(tmp_path):
    """A run folder of two checkpoints and the link."""
    put_file(tmp_path / "step=4.ckpt", age=60)
    put_file(tmp_path / "step=8.ckpt")
    os.symlink("step=8.ckpt", tmp_path / "last.ckpt")
    return tmp_path


def test_last_is_what_the_link_says_whatever_the_times_are(run):
    assert find_last(run) == run / "step=8.ckpt"
    os.utime(run / "step=8.ckpt", (0, 0))  # as after a copy that sets new times
    assert find_last(run) == run / "step=8.ckpt"


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_cut_off_file_is_passed_over_with_one_line(run, left):
    size = (run / "step=8.ckpt").stat().st_size
    cut(run / "step=8.ckpt", left % size)
    with pytest.warns(UserWarning, match=r"step=8\.ckpt is (cut off|empty).*going on from step=4\.ckpt") as lines:
        assert find_last(run) == run / "step=4.ckpt"
    assert len(lines) == 1


def test_a_dangling_link_is_passed_over(run):
    (run / "step=8.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"step=8\.ckpt does not exist; going on from step=4\.ckpt"):
        assert find_last(run) == run / "step=4.ckpt"


def test_without_a_link_the_newest_counts(run):
    (run / "last.ckpt").unlink()
    assert find_last(run) == run / "step=8.ckpt"


def test_if_none_is_whole_each_fault_is_named(run):
    for name in ("step=4.ckpt", "step=8.ckpt"):
        cut(run / name, 100)
    with pytest.raises(LockstepError, match=r"no checkpoint in .* is whole: step=8.*cut off.*step=4.*cut off"):
        find_last(run)


def test_what_is_half_written_has_no_say(run):
    put_folder(run / ".step=12.ckpt.tmp")
    assert find_last(run) == run / "step=8.ckpt"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "latest").unlink(), "no file `latest`"),
        (
            lambda f: (f / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
            "lacks zero_pp_rank_1_mp",
        ),
        (
            lambda f: (f / "checkpoint" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
            "lacks zero_pp_rank_1_mp",
        ),
        (lambda f: cut(f / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", 0), "is empty: zero_pp_rank_1"),
        (lambda f: cut(f / "checkpoint" / "zero_pp_rank_0_mp_rank_00_model_states.pt", 90), "cut off.*zero_pp_rank_0"),
        (lambda f: (f / "latest").write_text("global_step3"), "lacks the model or optimiser states in global_step3"),
    ],
)
def test_of_a_deepspeed_folder_every_part_must_be_there(tmp_path, damage, says):
    pytest.importorskip("deepspeed")
    put_folder(tmp_path / "step=4.ckpt", age=60)
    put_folder(tmp_path / "step=8.ckpt")
    os.symlink("step=8.ckpt", tmp_path / "last.ckpt")
    assert fault(tmp_path / "step=8.ckpt") is None
    damage(tmp_path / "step=8.ckpt")
    with pytest.warns(UserWarning, match=says):
        assert find_last(tmp_path) == tmp_path / "step=4.ckpt"


def test_a_folder_that_was_set_aside_gets_its_name_back(tmp_path):
    """Killed after the old folder lost its name and before the new one had it."""
    pytest.importorskip("deepspeed")
    put_folder(tmp_path / "step=4.ckpt")
    os.symlink("step=4.ckpt", tmp_path / "last.ckpt")
    os.rename(tmp_path / "step=4.ckpt", replaced(tmp_path / "step=4.ckpt"))
    assert find_last(tmp_path) == tmp_path / "step=4.ckpt"


def test_last_in_an_empty_folder_starts_anew_only_where_that_makes_sense(tmp_path):
    with pytest.warns(UserWarning, match="no checkpoint in .* yet; starting anew"):
        assert resolve_checkpoint("last", tmp_path / "none", start_anew=True) is None
    with pytest.raises(LockstepError, match="there is no checkpoint in"):
        resolve_checkpoint("last", tmp_path / "none", start_anew=False)


def test_a_path_is_checked_and_lightnings_words_are_passed_on(run):
    assert resolve_checkpoint(str(run / "step=4.ckpt"), run, start_anew=True) == str(run / "step=4.ckpt")
    for given in (None, "best", "hpc", "s3://bucket/a.ckpt"):
        assert resolve_checkpoint(given, run, start_anew=True) == given
    with pytest.raises(LockstepError, match=r"--ckpt_path: .*nowhere\.ckpt does not exist"):
        resolve_checkpoint(str(run / "nowhere.ckpt"), run, start_anew=True)
    (run / "notes.ckpt").write_text("no checkpoint")
    with pytest.raises(LockstepError, match="is cut off or no checkpoint"):
        resolve_checkpoint(str(run / "notes.ckpt"), run, start_anew=True)


class Ranks(World):
    """A world whose other rank has an answer of its own."""

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, self.other]


def test_ranks_that_see_different_checkpoints_stop(run):
    path = str(run / "step=8.ckpt")
    same = (path, (run / "step=8.ckpt").stat().st_mtime_ns)
    same_everywhere(path, Ranks(same))
    with pytest.raises(LockstepError, match=r"rank 0: .*step=8\.ckpt, rank 1: none"):
        same_everywhere(path, Ranks((None, None)))
    with pytest.raises(LockstepError, match="do not see the same checkpoint"):
        same_everywhere(path, Ranks((path, 0)))  # another file under that path
