"""An audit as JSON that tools can parse and compare, and back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from app.audit.types import Audit
from app.errors import LockstepError

VERSION = 1
"""Version of the schema; `from_json` refuses any other."""
_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\]")
"""An array of numbers, one a line. A JSON string contains no line break, so no text matches."""


def to_json(audit: Audit) -> str:
    """Return the audit as JSON: dataclasses as objects, keys in the order of their fields, `version` first.

    NaN and infinity, which JSON does not have, become null.
    """
    text = json.dumps({"version": VERSION, **_plain(audit)}, indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda array: "[" + " ".join(array[1].split()) + "]", text) + "\n"


def from_json(text: str) -> Audit:
    """Return the audit that `to_json` wrote.

    All finite values are restored exactly; null in place of a number becomes NaN.

    Raises:
        LockstepError: if the text is not JSON, or not an audit of this version; the message names place and fault.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise LockstepError(f"this is no audit: not JSON ({error}); give the audit.json that an audit wrote") from None
    if not isinstance(data, dict) or "version" not in data:
        raise LockstepError("this is no audit: it has no version; give the audit.json that an audit wrote")
    version = data.pop("version")
    if version != VERSION:
        raise LockstepError(f"audit of version {version!r}, this program reads {VERSION}; run the audit once more")
    return _decoded(Audit, data, "audit")


def _plain(value: Any) -> Any:
    """The value as JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(kind: Any, data: Any, where: str) -> Any:
    """The data converted to the type `kind`; `where` is for the message."""
    if isinstance(kind, type) and is_dataclass(kind):
        return _decoded_object(kind, data, where)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(data, list):
        kinds = [parts[0]] * len(data) if parts[-1] is Ellipsis else list(parts)
        if len(kinds) == len(data):
            return tuple(_decoded(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(data))
    elif origin is Mapping and isinstance(data, dict):
        return {key: _decoded(parts[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    elif origin in (Union, UnionType):  # of these carriers: a type or None
        other = next(part for part in parts if part is not NoneType)
        return None if data is None else _decoded(other, data, where)
    elif origin is Literal and data in parts:
        return data
    elif kind is float and (data is None or _is_number(data)):
        return math.nan if data is None else float(data)
    elif kind in (str, bool, int) and type(data) is kind:
        return data
    raise _foreign(f"{where} is {_described(data)}")


def _decoded_object(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _foreign(f"{where} is {_described(data)} where an object must be")
    kinds = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for words, keys in (("lacks", set(names) - data.keys()), ("has an unknown", data.keys() - set(names))):
        if keys:
            raise _foreign(f"{where} {words} {min(keys)}")
    return kind(**{name: _decoded(kinds[name], data[name], f"{where}.{name}") for name in names})


def _is_number(data: Any) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def _described(data: Any) -> str:
    text = json.dumps(data)
    return text if len(text) <= 40 else text[:40] + "…"


def _foreign(what: str) -> LockstepError:
    return LockstepError(f"this is no audit of version {VERSION}: {what}; give the audit.json that an audit wrote")
