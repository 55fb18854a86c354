"""Writing so that a name always stands for something whole, whatever kills the process and whenever."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from app.errors import LockstepError, causes


class SaveError(LockstepError):
    """A checkpoint could not be written. The message is the reason, as the system gives it."""


def unfinished(path: Path) -> Path:
    """Return the hidden name, in the same folder, under which `path` is written, or taken away."""
    return path.with_name(f".{path.name}.tmp")


def replaced(path: Path) -> Path:
    """Return the hidden name under which what is being replaced by a folder, or was a folder, is set aside."""
    return path.with_name(f".{path.name}.old")


def write_file(value: Any, path: Path) -> None:
    """Write `value` with torch.save under a hidden name, make it durable, then give it its name.

    It streams to the disk: no copy of the file is built in memory.

    Raises:
        SaveError: if it cannot be written. Nothing is left behind, and an earlier file of that name is untouched.
    """
    try:
        with named_when_whole(path) as temporary:
            write_durably(value, temporary)
    except (OSError, RuntimeError) as error:
        raise SaveError(reason(error)) from error


@contextlib.contextmanager
def named_when_whole(path: Path) -> Iterator[Path]:
    """Give the hidden name to write a file under, and the file its own name when the block ends without an error.

    Else nothing is left behind, and an earlier file of that name is untouched.
    """
    temporary = unfinished(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        give_name(path)
    except (OSError, RuntimeError):
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_durably(value: Any, path: Path) -> None:
    """Write `value` with torch.save and wait until the disk has it."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_name(path: Path) -> None:
    """Give the whole file or folder that was written under `unfinished(path)` its name.

    A file replaces another in one system call; where a folder is involved there is none. The older one is set aside
    first then, and `restore_replaced` puts it back if the process is killed in between.
    """
    if path.is_dir() or (path.exists() and unfinished(path).is_dir()):
        _delete(replaced(path))
        os.rename(path, replaced(path))
    os.replace(unfinished(path), path)
    sync_folder(path.parent)
    _delete(replaced(path))


def set_link(link: Path, target: Path) -> None:
    """Let `link` point to `target` in the same folder, in one step: at every moment it points to something whole."""
    if link.is_dir() and not link.is_symlink():  # a copy that followed links; a link cannot replace it
        remove(link)
    temporary = unfinished(link)
    temporary.unlink(missing_ok=True)
    os.symlink(target.name, temporary)
    os.replace(temporary, link)
    sync_folder(link.parent)


def remove(path: Path) -> None:
    """Delete a file or a folder; it loses its name first, so that a half-deleted one has none."""
    temporary = unfinished(path)
    _delete(temporary)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, temporary)
        _delete(temporary)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed runs left half-written or half-deleted, and put back what they had set aside."""
    restore_replaced(folder)
    for path in folder.glob(".*.ckpt.*"):
        if path.suffix in (".tmp", ".old"):
            _delete(path)


def restore_replaced(folder: Path) -> None:
    """Give a folder its name back if the process was killed before its replacement had it."""
    for old in folder.glob(".*.ckpt.old"):
        path = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not path.exists():
            with contextlib.suppress(OSError):  # another process was faster, or the folder is read-only
                os.rename(old, path)


def reason(error: Exception) -> str:
    """Return why writing failed, in a few words, as the system reports it."""
    for cause in causes(error):  # torch hides the system's answer behind an error of its own
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_writable(folder: Path, key: str) -> None:
    """Make a folder, and refuse it before anything slow begins if nothing can be written there.

    Raises:
        LockstepError: naming `key`, the setting that names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LockstepError(f"{key}={folder}: cannot write there ({error.strerror}); choose another folder") from error
