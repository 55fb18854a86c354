"""Signals are obeyed at once or noted, and SLURM is asked once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from app.distributed.stop_signals import Stopped, StopSignals, requeue, slurm_job, started_again

ENDING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def nothing_ignored():
    """Whatever started pytest may ignore Ctrl-C, as a shell does for its background jobs."""
    former = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)  # before it returns, the handler has run


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 130)])
def test_outside_training_a_signal_ends_the_run_with_the_status_of_a_process_that_it_ended(number, status):
    signals = StopSignals()
    signals.situation = " before the first step"
    with signals.handled(ENDING), pytest.raises(Stopped) as stopped:
        send(number)
    assert stopped.value.code == status
    assert stopped.value.line == f"stopped by {number.name} before the first step"


def test_no_except_exception_on_the_way_takes_it_for_a_fault():
    assert not issubclass(Stopped, Exception)


def test_while_deferred_the_first_signal_is_noted_and_said_and_repeats_change_nothing(capfd):
    signals = StopSignals()
    signals.defer()
    with signals.handled(ENDING):
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
    assert signals.received == signal.SIGUSR1
    assert capfd.readouterr().err.count("ends after this optimiser step") == 1


def test_ctrl_c_notes_first_and_ends_at_once_the_second_time():
    signals = StopSignals()
    signals.defer()
    with signals.handled(ENDING):
        send(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(Stopped) as stopped:
            send(signal.SIGINT)
    assert stopped.value.code == 130


def test_a_signal_noted_and_not_yet_agreed_on_is_obeyed_when_training_is_over():
    signals = StopSignals()
    signals.defer()
    signals.obey("")  # none was noted
    signals.defer()
    with signals.handled(ENDING):
        send(signal.SIGTERM)
    with pytest.raises(Stopped, match="143"):
        signals.obey(" after the last step")


def test_former_handlers_come_back_and_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    term = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals().handled(ENDING):
            assert signal.getsignal(signal.SIGTERM) is not term
            send(signal.SIGUSR1)  # would raise
        assert signal.getsignal(signal.SIGTERM) is term
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def fake_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str = "") -> Path:
    """A `scontrol` first in PATH that writes its arguments to the file returned."""
    asked = folder / "asked"
    script = folder / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{ending}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return asked


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "123"}, "123"),
        ({"SLURM_JOB_ID": "124", "SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "4"}, "120_4"),
    ],
)
def test_a_job_is_requeued_by_its_name_and_a_task_of_an_array_by_its_own(variables, job, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = fake_scontrol(tmp_path, monkeypatch)
    assert slurm_job() == job
    assert requeue(slurm_job()) is None
    assert asked.read_text() == f"requeue {job}\n"


def test_a_refusal_is_told(tmp_path, monkeypatch):
    fake_scontrol(tmp_path, monkeypatch, ending="echo 'Requested operation is disabled' >&2; exit 1")
    assert requeue("1") == "Requested operation is disabled"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert requeue("1") == "scontrol: No such file or directory"


def test_a_requeued_job_knows_it(monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert not started_again()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert started_again()
