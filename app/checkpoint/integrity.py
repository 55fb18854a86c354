"""Whether a checkpoint is whole, without reading its tensors."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from app.checkpoint.zero import ZeroFiles
from app.errors import LockstepError


def fault(path: Path) -> str | None:
    """Return what is wrong with the checkpoint at `path`, in words that follow its name, or None if it is whole.

    Cheap: of a file only the directory at its end is read, which torch writes last; of a DeepSpeed folder also the
    small part that records how many processes wrote it.
    """
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which does not exist"
    if not path.exists():
        return "does not exist"
    if path.is_dir():
        return _folder_fault(path)
    return _file_fault(path)


def _file_fault(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        return "is cut off or no checkpoint: its end is missing" if path.stat().st_size else "is empty"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if any(re.search(r"(^|/)data\.pkl$", name) for name in names) else "is no checkpoint"


def _folder_fault(folder: Path) -> str | None:
    try:
        files = ZeroFiles.find(folder)
        for file in files.present:
            if (wrong := _file_fault(file)) is not None:
                return f"has a part that {wrong}: {file.name}"
        for file in files.expected():
            if not file.exists():
                return f"lacks {file.name}"
    except LockstepError as error:
        return str(error)
    return None
