"""From the user's --ckpt_path (`last`, or a path) to a checkpoint that is whole."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from app.checkpoint.files import restore_replaced
from app.checkpoint.integrity import fault
from app.errors import LockstepError
from app.world import World

LAST = "last.ckpt"
"""The link to the newest checkpoint of a run folder."""


def resolve_checkpoint(given: str | None, folder: Path, *, start_anew: bool) -> str | None:
    """Return the path of the checkpoint to use, or None to start anew.

    Args:
        given: --ckpt_path. None, Lightning's `best`, `hpc` and `registry...`, and addresses such as s3://... are
            returned as they are.
        folder: the run's checkpoints, for `last`.
        start_anew: whether `last` may mean nothing: a job that may be requeued passes it from its first start on.

    Raises:
        LockstepError: if there is no such checkpoint or none is whole.
    """
    if given is None or given in ("best", "hpc") or given.startswith("registry") or "://" in given:
        return given
    if given != "last":
        path = Path(given)
        if (wrong := fault(path)) is not None:
            raise LockstepError(f"--ckpt_path: {path} {wrong}")
        return str(path)
    last = find_last(folder)
    if last is None:
        if not start_anew:
            raise LockstepError(f"--ckpt_path last: there is no checkpoint in {folder}")
        rank_zero_warn(f"--ckpt_path last: there is no checkpoint in {folder} yet; starting anew")
        return None
    return str(last)


def find_last(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run folder; None if it holds no checkpoint at all.

    That is the one `last.ckpt` points to: the time stamps of the others do not survive every copy. Only if that one
    is broken do they decide.

    Raises:
        LockstepError: if there are checkpoints but none is whole.
    """
    restore_replaced(folder)
    link = folder / LAST
    others = sorted(
        (path for path in folder.glob("*.ckpt") if not path.is_symlink() and path != link),
        key=lambda path: path.stat().st_mtime_ns,
        reverse=True,
    )
    linked = link.resolve() if link.is_symlink() else link
    candidates = [linked, *(path for path in others if path.resolve() != linked)]
    if not link.is_symlink() and not link.exists():
        candidates = others
    faults: list[str] = []
    for path in candidates:
        wrong = fault(path)
        if wrong is None:
            if faults:
                rank_zero_warn(f"--ckpt_path last: in {folder} {'; '.join(faults)}; going on from {path.name} instead")
            return path
        faults.append(f"{path.name} {wrong}")
    if candidates:
        raise LockstepError(f"--ckpt_path last: no checkpoint in {folder} is whole: {'; '.join(faults)}")
    return None


def same_everywhere(path: str | None, world: World) -> None:
    """Check that every rank found the same checkpoint. All ranks must call it together.

    Raises:
        LockstepError: if not; with a mixture the run would hang or train on two states.
    """
    local = path is not None and Path(path).exists()
    found = world.gather((path, Path(path).stat().st_mtime_ns if path is not None and local else None))
    if any(other != found[0] for other in found):
        ranks = ", ".join(f"rank {rank}: {other[0] or 'none'}" for rank, other in enumerate(found))
        raise LockstepError(
            f"--ckpt_path: the processes do not see the same checkpoint ({ranks}); the run folder must be on storage "
            f"that all machines share"
        )
