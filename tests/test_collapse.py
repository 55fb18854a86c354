"""The collapse experiment's sums, commands and picture, from made-up curves."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from app.engine.vllm.engine import VLLMEngine
from tests.benchmarks.collapse import Curve, as_text, first_alarm, lowest, result, summarise
from tests.benchmarks.collapse_parts import StaleEngine
from tests.benchmarks.collapse_plot import plot, spread
from tests.benchmarks.collapse_runs import ARMS, Experiment, command


def made_up(last: float, alarm: int | None) -> dict[str, Curve]:
    """A run whose exact match ends in `last`, and whose guard fires at `alarm`."""
    mismatch = {step: 10.0**-step for step in range(4)}
    return {
        "exact_match": {0: 0.5, 5: last, 10: last, 15: last},
        "k3": mismatch,
        "ess": mismatch,
        "trained": mismatch,
        "guard": {step: 0.0 if alarm is None else float(min(2, max(0, step - alarm + 2))) for step in range(4)},
    }


@pytest.fixture
def found() -> dict[str, dict[int, dict[str, Curve]]]:
    """Two arms of two seeds; the second loses 0.6 and 0.2."""
    return {
        "on_policy": {1: made_up(0.9, None), 2: made_up(0.7, None)},
        "uncorrected": {1: made_up(0.3, 2), 2: made_up(0.5, 3)},
    }


def test_a_result_is_the_mean_of_the_last_three_scores() -> None:
    assert result({15: 0.9, 0: 0.1, 5: 0.3, 10: 0.6}) == pytest.approx(0.6)


def test_the_lowest_score_is_not_that_of_the_start() -> None:
    assert lowest({0: 0.1, 5: 0.7, 10: 0.3, 15: 0.6}) == 0.3


def test_the_first_alarm_is_where_the_rule_fires_not_where_it_starts_to_count() -> None:
    assert first_alarm({3: 2.0, 1: 0.0, 2: 1.0, 4: 2.0}) == 3
    assert first_alarm({1: 0.0, 2: 1.0, 3: 0.0}) is None
    assert first_alarm({}) is None


def test_arms_are_compared_seed_by_seed(found: dict[str, dict[int, dict[str, Curve]]]) -> None:
    row = summarise(found)["uncorrected"]
    assert row["mean"] == pytest.approx(0.4)
    assert row["std"] == pytest.approx(0.2 / 2**0.5)  # of a sample of two
    assert row["lowest"] == pytest.approx(0.4)
    assert row["against_baseline"] == pytest.approx(-0.4)
    assert row["worst_against_baseline"] == pytest.approx(-0.6)
    assert row["first_alarm"] == {1: 2, 2: 3}
    healthy, stale = as_text(summarise(found)).splitlines()[1:]
    assert healthy.endswith("never")
    assert "-0.400" in stale
    assert stale.endswith("2–3")


def test_a_run_in_which_the_guard_never_fired_is_not_hidden(found: dict[str, dict[int, dict[str, Curve]]]) -> None:
    found["uncorrected"][2] = made_up(0.5, None)
    assert as_text(summarise(found)).endswith("2, 1 of 2 never")


def test_the_spread_is_over_the_steps_that_all_runs_have() -> None:
    assert spread([{1: 1.0, 2: 2.0, 3: 9.0}, {1: 3.0, 2: 6.0}]) == ([1, 2], [2.0, 4.0], [1.0, 2.0], [3.0, 6.0])


def test_the_picture_is_drawn(tmp_path: Path, found: dict[str, dict[int, dict[str, Curve]]]) -> None:
    plot(tmp_path / "picture.png", found, {name: ARMS[name].label for name in found}, arrivals=[0, 2])
    assert imread(tmp_path / "picture.png").std() > 0.01


def test_only_faulty_arms_get_a_stale_engine() -> None:
    experiment = Experiment(steps=10, stale_from=0, sync_every=4)
    for arm in ARMS.values():
        line = " ".join(command(arm, 1, experiment, Path("folder")))
        assert ("StaleEngine" in line) == arm.faulty


@pytest.mark.parametrize(
    ("stale_from", "sync_every", "arrivals"), [(0, 4, [0, 4, 8]), (3, 5, [3, 8]), (6, 0, [6]), (0, 0, [0])]
)
def test_the_stale_engine_takes_the_weights_that_the_picture_marks(
    monkeypatch: pytest.MonkeyPatch, stale_from: int, sync_every: int, arrivals: list[int]
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(VLLMEngine, "load_weights", lambda self, weights, version: taken.append(version))
    engine = StaleEngine(stale_from, sync_every)
    for version in range(11):
        engine.load_weights((), version)
    assert Experiment(steps=10, stale_from=stale_from, sync_every=sync_every).arrivals == arrivals
    assert [version for version in taken if version >= stale_from] == arrivals
    assert taken[: stale_from + 1] == list(range(stale_from + 1))
