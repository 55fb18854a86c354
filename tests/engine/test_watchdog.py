"""The watchdog: an exception where Python can be interrupted, the end of the process where it cannot."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from app.engine.errors import EngineError
from app.engine.watchdog import SIGNAL, Clock, Patience, Stalled, Watchdog
from tests.engine.clocks import ScriptedClock, StandingClock

OTHERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGINT)
SECONDS, GRACE = 10.0, 4.0


def watched(*script: tuple[float, Callable[[Patience], object]], seconds: float = SECONDS) -> list[tuple[str, float]]:
    """What is done, and when, about work that began at 0 and does this."""
    clock, done = ScriptedClock(), []
    patience = Patience(seconds, GRACE, clock)
    clock.script = [(moment, lambda happens=happens: happens(patience)) for moment, happens in script]
    patience.beat()
    patience.watch(lambda: done.append(("interrupted", clock.time)), lambda: done.append(("ended", clock.time)))
    return done


def test_progress_is_counted_not_the_whole_time():
    beats = [(9.0 * number, Patience.beat) for number in range(1, 100)]
    assert watched(*beats, (900.0, Patience.stop)) == []


def test_work_without_progress_is_interrupted_and_after_a_grace_ended():
    assert watched() == [("interrupted", 10.0), ("ended", 14.0)]
    assert watched((3.0, Patience.beat)) == [("interrupted", 13.0), ("ended", 17.0)]


def test_work_that_comes_back_in_the_grace_is_not_ended():
    assert watched((13.0, Patience.stop)) == [("interrupted", 10.0)]
    assert watched((13.0, Patience.beat), (20.0, Patience.stop)) == [("interrupted", 10.0)]


def test_work_that_came_back_is_watched_as_before():
    assert watched((13.0, Patience.beat)) == [("interrupted", 10.0), ("interrupted", 23.0), ("ended", 27.0)]


def test_a_limit_without_end_is_one():
    assert watched((1e12, Patience.stop), seconds=float("inf")) == []
    with Watchdog(float("inf"), "the engine"):  # more than the machine's clock can wait at once
        pass


def test_the_machines_clock_goes_and_waits():
    clock, event = Clock(), threading.Event()
    before = clock.now()
    assert not clock.wait(event, 0.01)
    assert clock.now() > before
    event.set()
    assert clock.wait(event, float("inf"))


def test_no_except_exception_on_the_way_swallows_it():
    assert not issubclass(Stalled, Exception)


def test_hanging_work_is_interrupted_by_a_real_signal_and_its_place_named():
    """And handlers and threads are as before, as they are after work that does not hang."""
    mine = signal.signal(SIGNAL, lambda *_: None)
    try:
        kept = signal.getsignal(SIGNAL)
        before = [signal.getsignal(number) for number in OTHERS]

        def check(watchdog: Watchdog) -> None:
            assert signal.getsignal(SIGNAL) is kept
            assert [signal.getsignal(number) for number in OTHERS] == before
            watchdog._thread.join(60)
            assert not watchdog._thread.is_alive()

        clock = StandingClock()
        healthy = Watchdog(SECONDS, "the engine", clock=clock)
        with healthy:
            assert [signal.getsignal(number) for number in OTHERS] == before
            assert signal.getsignal(SIGNAL) is not kept
        check(healthy)

        def hang() -> None:
            clock.time += SECONDS
            try:
                time.sleep(600)
            except Exception:
                time.sleep(600)

        hanging = Watchdog(SECONDS, "the engine", clock=clock)
        message = r"the engine made no progress for 10 s \(in hang, .*test_watchdog\.py:"
        with pytest.raises(Stalled, match=message), hanging:
            hang()
        check(hanging)
    finally:
        signal.signal(SIGNAL, mine)


def test_a_signal_that_comes_late_harms_nobody():
    with Watchdog(SECONDS, "the engine", clock=StandingClock()):
        signal.raise_signal(SIGNAL)  # came back before the handler ran: no progress is missing
    signal.raise_signal(SIGNAL)


def test_none_watches_nothing():
    before = signal.getsignal(SIGNAL)
    with Watchdog(None, "the engine") as watchdog:
        watchdog.beat()
        assert signal.getsignal(SIGNAL) is before


def test_outside_the_main_thread_it_is_refused_with_the_key():
    caught: list[Exception] = []

    def watched() -> None:
        try:
            with Watchdog(1.0, "the engine"):
                pass
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=watched)
    thread.start()
    thread.join()
    assert "data.engine.stall_timeout: null" in str(caught[0])


def test_native_code_that_does_not_come_back_ends_the_process():
    code = """if True:
        from app.engine.watchdog import Watchdog
        from tests.engine.clocks import StandingClock
        from tests.faulty_engine import in_second_lock, lock_twice
        with Watchdog(10, "the engine", grace=4, clock=StandingClock(in_second_lock)):
            lock_twice()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("rank 0: the engine made no progress for 10 s and could not be interrupted for another 4 s")
    assert "(in lock_twice, " in line
    assert "--ckpt_path last" in line
