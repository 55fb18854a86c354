"""The watchdog: an exception where Python can be interrupted, the end of the process where it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from app.engine.errors import EngineError
from app.engine.watchdog import SIGNAL, Stalled, Watchdog

OTHERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGINT)


def test_sleeping_work_is_interrupted_and_its_place_named():
    start = time.monotonic()
    message = r"the engine made no progress for 0\.2 s \(in test_sleeping.*test_watchdog\.py:"
    with pytest.raises(Stalled, match=message), Watchdog(0.2, "the engine"):
        time.sleep(30)
    assert 0.2 <= time.monotonic() - start < 5


def test_a_lock_that_never_opens_is_interrupted():
    with pytest.raises(Stalled), Watchdog(0.1, "the engine"):
        threading.Event().wait(30)


def test_the_interrupted_code_cannot_swallow_it():
    def swallowing() -> None:
        try:
            time.sleep(30)
        except Exception:
            time.sleep(30)

    with pytest.raises(Stalled), Watchdog(0.1, "the engine"):
        swallowing()


def test_progress_is_counted_not_the_whole_time():
    with Watchdog(0.4, "the engine") as watchdog:
        for _ in range(12):
            time.sleep(0.1)
            watchdog.beat()


def test_handlers_and_threads_are_as_before():
    mine = signal.signal(SIGNAL, lambda *_: None)
    try:
        kept = signal.getsignal(SIGNAL)
        before = [signal.getsignal(number) for number in OTHERS]
        for seconds in (30.0, 0.05):
            try:
                with Watchdog(seconds, "the engine"):
                    assert [signal.getsignal(number) for number in OTHERS] == before
                    assert signal.getsignal(SIGNAL) is not kept
                    if seconds < 1:
                        time.sleep(30)
            except Stalled:
                pass
            assert signal.getsignal(SIGNAL) is kept
            assert [signal.getsignal(number) for number in OTHERS] == before
    finally:
        signal.signal(SIGNAL, mine)
    time.sleep(0.1)
    assert "lockstep-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_signal_that_comes_late_harms_nobody():
    with Watchdog(30.0, "the engine"):
        os.kill(os.getpid(), SIGNAL)  # came back before the handler ran: no progress is missing
        time.sleep(0.01)
    os.kill(os.getpid(), SIGNAL)
    time.sleep(0.01)


def test_a_limit_without_end_is_one():
    with Watchdog(float("inf"), "the engine"):
        time.sleep(0.05)


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
        from tests.faulty_engine import _lock_twice
        with Watchdog(0.3, "the engine", grace=0.3):
            _lock_twice()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("rank 0: the engine made no progress for 0.3 s and could not be interrupted for another 0.3")
    assert "(in _lock_twice, " in line
    assert "--ckpt_path last" in line
