"""When a run ends, whether it is saved first, and what becomes of its job."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from app.distributed.stop_signals import Stopped
from app.world import World
from callbacks import preemption
from callbacks.preemption import Preemption
from tests.callbacks.saves import Saves

MODULE = SimpleNamespace(device=torch.device("cpu"), world=World())


@pytest.fixture
def asked(monkeypatch):
    """The jobs that SLURM is asked to requeue."""
    jobs = []
    monkeypatch.setattr(preemption, "requeue", jobs.append)  # returns None: done
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    return jobs


def trainer_in(environment, *, saves=None, rank=0, max_steps=100):
    return SimpleNamespace(
        global_step=4,
        max_steps=max_steps,
        callbacks=[Saves() if saves is None else saves],
        is_global_zero=rank == 0,
        local_rank=rank,
        _signal_connector=SimpleNamespace(received_sigterm=False),
        _accelerator_connector=SimpleNamespace(cluster_environment=environment),
    )


def stopped_at_step_5(trainer, number, received=True):
    """A callback that has seen a signal during step 5, and that step's end."""
    callback = Preemption()
    with callback.attached(trainer):
        callback.on_train_start(trainer, MODULE)
        callback.signals.received = number if received else None
        callback.on_train_batch_end(trainer, MODULE, None, None, 0)  # inside the accumulation window
        assert callback.agreed is None
        trainer.global_step = 5
        callback.on_train_batch_end(trainer, MODULE, None, None, 1)
    return callback


def how_it_ends(trainer, number=signal.SIGTERM):
    callback = stopped_at_step_5(trainer, number)
    with pytest.raises(Stopped) as stopped:
        callback.end(trainer)
    return stopped.value.code, stopped.value.line


def test_without_a_signal_nothing_happens():
    trainer = trainer_in(LightningEnvironment())
    callback = stopped_at_step_5(trainer, None)
    assert callback.agreed is None
    assert trainer.callbacks[0].steps == []
    assert not trainer._signal_connector.received_sigterm


def test_the_end_of_the_step_is_saved_and_lightning_ends_the_loop():
    saves = Saves()
    trainer = trainer_in(TorchElasticEnvironment(), saves=saves)
    code, line = how_it_ends(trainer)
    assert saves.steps == [5]
    assert trainer._signal_connector.received_sigterm
    assert code == 143
    assert line == "stopped by SIGTERM after optimiser step 5, which is saved; go on with --ckpt_path last"


def test_a_signal_that_only_another_rank_got_ends_this_one_too(monkeypatch):
    order = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    others = {signal.SIGTERM: 1.0}
    monkeypatch.setattr(World, "sum", lambda self, own: own + torch.tensor([others.get(s, 0.0) for s in order]))
    saves = Saves()
    callback = stopped_at_step_5(trainer_in(LightningEnvironment(), saves=saves), None, received=False)
    assert callback.agreed == signal.SIGTERM
    assert saves.steps == [5]
    # of two signals the one that asks for a requeue wins, on every rank
    callback = stopped_at_step_5(trainer_in(LightningEnvironment()), signal.SIGUSR1)
    assert callback.agreed == signal.SIGUSR1


def test_slurm_is_asked_by_rank_0_after_the_save(asked):
    code, line = how_it_ends(trainer_in(slurm()), signal.SIGUSR1)
    assert asked == ["77"]
    assert code == 0
    assert "which is saved; SLURM job 77 is queued again" in line
    assert how_it_ends(trainer_in(slurm(), rank=1), signal.SIGUSR1)[0] == 0
    assert asked == ["77"]


def slurm(**settings):
    return SLURMEnvironment(**settings)


@pytest.mark.parametrize(
    ("settings", "number", "requeues"),
    [
        ({}, signal.SIGTERM, False),
        ({"auto_requeue": False}, signal.SIGUSR1, False),
        ({"requeue_signal": signal.SIGUSR2}, signal.SIGUSR2, True),
        ({"requeue_signal": signal.SIGUSR2}, signal.SIGUSR1, False),
    ],
)
def test_only_the_requeue_signal_of_the_environment_requeues(settings, number, requeues, asked):
    code, _ = how_it_ends(trainer_in(slurm(**settings)), number)
    assert bool(asked) == requeues
    assert code == (0 if requeues else 128 + number)


def test_a_refused_requeue_is_no_success(asked, monkeypatch):
    monkeypatch.setattr(preemption, "requeue", lambda job: "disabled")
    code, line = how_it_ends(trainer_in(slurm()), signal.SIGUSR1)
    assert code == 138
    assert "could not be requeued (disabled): go on with --ckpt_path last" in line


@pytest.mark.parametrize("saves", [SimpleNamespace(), Saves(save_top_k=0)], ids=["no checkpoints", "save_top_k=0"])
def test_what_is_not_saved_is_not_requeued_for_it_would_begin_anew_for_ever(saves, asked):
    code, line = how_it_ends(trainer_in(slurm(), saves=saves), signal.SIGUSR1)
    assert (asked, code) == ([], 138)
    assert "nothing is saved" in line


def test_a_complete_training_is_not_requeued(asked):
    code, line = how_it_ends(trainer_in(slurm(), max_steps=5), signal.SIGUSR1)
    assert (asked, code) == ([], 138)
    assert "the last one, which is saved; for the scores: validate" in line


def test_processes_that_lightning_started_leave_the_exit_status_to_their_launcher():
    assert how_it_ends(trainer_in(LightningEnvironment(), rank=1))[0] == 0
    assert how_it_ends(trainer_in(LightningEnvironment(), rank=0))[0] == 143
    assert how_it_ends(trainer_in(TorchElasticEnvironment(), rank=1))[0] == 143


@pytest.mark.parametrize(
    ("training", "line"),
    [
        (True, "stopped by SIGTERM before the first optimiser step, there is nothing new to save"),
        (False, "stopped by SIGTERM"),
    ],
)
def test_before_training_and_beside_it_a_signal_is_obeyed_at_once(training, line):
    callback = Preemption()
    with callback.attached(trainer_in(LightningEnvironment()), training), pytest.raises(Stopped) as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert (stopped.value.line, stopped.value.code) == (line, 143)


def test_after_training_a_signal_is_obeyed_at_once_also_one_that_came_too_late_to_be_agreed_on():
    trainer = trainer_in(LightningEnvironment())
    callback = Preemption()
    with callback.attached(trainer):
        callback.on_train_start(trainer, MODULE)
        signal.raise_signal(signal.SIGTERM)  # noted only
        with pytest.raises(Stopped, match="143") as stopped:
            callback.on_train_end(trainer, MODULE)
    assert "after the last optimiser step; for the scores" in stopped.value.line


def test_a_validation_that_falls_on_the_last_step_is_left_out():
    trainer = trainer_in(LightningEnvironment())
    callback = stopped_at_step_5(trainer, signal.SIGTERM)
    with pytest.raises(Stopped):
        callback.on_validation_start(trainer, MODULE)
    stopped_at_step_5(trainer_in(LightningEnvironment()), None).on_validation_start(trainer, MODULE)
