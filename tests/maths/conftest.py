from __future__ import annotations

import pytest

from tests.maths.closed_form import Pair, make_pair


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A mismatch far larger than any healthy run's, so that every mistake is many standard errors wide."""
    return make_pair(seed=4, mismatch=1.0)
