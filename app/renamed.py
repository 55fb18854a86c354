"""Settings by the names of earlier versions, so that a configuration that a run saved can still be given."""

from __future__ import annotations

import atexit
import tempfile
import warnings
from pathlib import Path
from typing import Any

import yaml

RENAMED = {"data.resample_spreadless": "data.resample_zero_std"}
"""Key of an earlier version -> key of this one."""


def with_current_names(args: list[str]) -> list[str]:
    """Return command-line arguments with the keys of this version, in options and in the files of --config.

    A file with an earlier name is copied with the current one; the copy is what is read. Files that cannot be read are
    left to the parser, which says why.
    """
    found = []
    follows = False
    for argument in args:
        name, equals, value = argument.partition("=")
        if follows:
            found.append(_file(argument))
        elif name in ("--config", "-c") and equals:
            found.append(f"{name}={_file(value)}")
        else:
            key = _option(name)
            found.append(f"--{key}{equals}{value}" if key else argument)
        follows = argument in ("--config", "-c")
    return found


def _option(name: str) -> str | None:
    """The current name of an option that had another one."""
    key = RENAMED.get(name.removeprefix("--")) if name.startswith("--") else None
    if key is not None:
        _say(name.removeprefix("--"), key)
    return key


def _file(path: str) -> str:
    """The file, or a copy of it with current names if it has earlier ones."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return path
    if not isinstance(content, dict) or not _rename(content):
        return path
    with tempfile.NamedTemporaryFile("w", suffix=f"-{Path(path).name}", delete=False, encoding="utf-8") as copy:
        yaml.safe_dump(content, copy, sort_keys=False)
    atexit.register(Path(copy.name).unlink, missing_ok=True)
    return copy.name


def _rename(content: dict[str, Any]) -> bool:
    """Rename keys in place, also below the name of a command; return whether there were any."""
    changed = False
    for old, new in RENAMED.items():
        group, key = old.split(".")
        for part in (content, *(value for value in content.values() if isinstance(value, dict))):
            section = part.get(group)
            if isinstance(section, dict) and key in section:
                section.setdefault(new.split(".")[1], section.pop(key))
                _say(old, new)
                changed = True
    return changed


def _say(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} now", stacklevel=2)
