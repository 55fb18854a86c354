"""Compare what the engine holds with what it should hold."""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import LockstepError, listed


class SyncError(LockstepError, RuntimeError):
    """The engine does not sample with the trainer's weights."""


def compare(expected: Mapping[str, int], actual: Mapping[str, int]) -> None:
    """Check that both sides list the same parameters with the same checksums.

    Raises:
        SyncError: naming the parameters that differ, that the engine lacks, or that only the engine has.
    """
    differing = [name for name in expected if name in actual and actual[name] != expected[name]]
    lacking = [name for name in expected if name not in actual]
    extra = [name for name in actual if name not in expected]
    faults = [
        f"{what} {len(names)} of {len(expected)} parameters: {listed(names)}"
        for what, names in (
            ("different bits in", differing),
            ("the engine lacks", lacking),
            ("only the engine has", extra),
        )
        if names
    ]
    if faults:
        raise SyncError("the engine's weights are not the trainer's: " + "; ".join(faults))
