"""All ranks raise if one does, and each knows why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.world import World
from tests.threads import on_two_threads


class PeerError(Exception):
    """What a rank raises because another one failed."""


def failing(*ranks: int, error: type[Exception] = ValueError) -> Callable[[World], Callable[[], int]]:
    """An action that returns its rank, or fails on the given ones."""

    def of(world: World) -> Callable[[], int]:
        def action() -> int:
            if world.rank in ranks:
                raise error(f"broken on {world.rank}")
            return world.rank

        return action

    return of


def outcomes(*ranks: int, error: type[Exception] = ValueError, **arguments) -> list[tuple[type, str]]:
    found = on_two_threads(lambda world: world.together(failing(*ranks, error=error)(world), PeerError, **arguments))
    return [(type(outcome), str(outcome)) for outcome in found]


def test_every_rank_gets_its_own_result():
    assert outcomes() == [(int, "0"), (int, "1")]
    assert outcomes(reason=str) == [(int, "0"), (int, "1")]
    assert World().together(lambda: "alone", PeerError) == "alone"


def test_the_failed_rank_raises_its_own_error_and_the_others_a_peers():
    assert outcomes(1) == [(PeerError, "rank 1 failed: ValueError: broken on 1"), (ValueError, "broken on 1")]
    assert outcomes(0, 1) == [(ValueError, "broken on 0"), (ValueError, "broken on 1")]


def test_some_errors_keep_their_class_on_the_other_ranks():
    peer = "rank 0 failed: KeyError: 'broken on 0'"
    assert outcomes(0, error=KeyError, as_own=LookupError)[1] == (LookupError, peer)
    assert outcomes(0, error=KeyError, as_own=OSError)[1] == (PeerError, peer)


def test_with_a_reason_all_ranks_raise_the_same():
    assert outcomes(1, reason=str) == [(PeerError, "broken on 1 (rank 1)")] * 2
    assert outcomes(0, 1, reason=str) == [(PeerError, "broken on 0 (rank 0)")] * 2
    with pytest.raises(PeerError, match=r"^broken on 0$"):  # alone there is no other rank to name
        World().together(failing(0)(World()), PeerError, reason=str)


def test_a_rank_is_named_once_however_deep_the_failure():
    def nested(world: World) -> object:
        def inner() -> int:
            return world.together(failing(1)(world), PeerError, reason=str)

        return world.together(inner, PeerError, reason=str)

    assert [str(error) for error in on_two_threads(nested)] == ["broken on 1 (rank 1)"] * 2
