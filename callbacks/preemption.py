"""SIGTERM, SIGUSR1 and Ctrl-C: a checkpoint at the end of the optimiser step, and a clean end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn

from app.distributed.processes import check_shared
from app.distributed.stop_signals import Stopped, StopSignals, requeue, slurm_job, status_of
from app.rollout.steps import TrainStep
from app.world import HasWorld
from callbacks.rollout_checkpoint import RolloutCheckpoint


class QuietSignals(_SignalConnector):
    """Lightning's signal connector without its handlers.

    They run collectives, save checkpoints and requeue wherever a signal finds the process: in the middle of a
    rollout, or of another collective, which deadlocks. Only `received_sigterm` is kept, by which its loops end.
    """

    def register_signal_handlers(self) -> None:
        """Register nothing."""


class Preemption(Callback):
    """Ends a run when a signal requests it: all ranks together, after an optimiser step, saved.

    A signal may reach one process only (`kill`, a container's first process) or all of them (srun, Ctrl-C), and not at
    the same step. So after every optimiser step the ranks add up what each has received, by one sum of three or four
    numbers. It must be the last of the callbacks, so that what the others note of the step is in the checkpoint;
    RolloutCheckpoint is later still.
    """

    def __init__(self) -> None:
        self.signals = StopSignals()
        self.agreed: signal.Signals | None = None
        """The signal on which all ranks agreed to end the run."""
        self._order: tuple[signal.Signals, ...] = ()
        self._saved = False
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that checkpoints of several machines will land in one folder."""
        if trainer.num_nodes > 1 and stage == TrainerFn.FITTING:
            check_shared(Path(trainer.default_root_dir) / "checkpoints", cast(HasWorld, pl_module).world)

    @contextlib.contextmanager
    def attached(self, trainer: Trainer, training: bool = True) -> Iterator[None]:
        """Handle the signals inside the block, in Lightning's place; `training` says whether steps are to come."""
        trainer._signal_connector = QuietSignals(trainer)
        self.signals.situation = " before the first optimiser step, there is nothing new to save" if training else ""
        self._order = _by_urgency(_environment(trainer))
        with self.signals.handled(self._order):
            yield

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on there is something to save."""
        self._step = trainer.global_step
        self.signals.defer()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """After an optimiser step, save and end the run if any rank has received a signal.

        Not inside an accumulation window: its gradients would be lost.
        """
        if trainer.global_step == self._step or self.agreed is not None:
            return
        self._step = trainer.global_step
        own = torch.tensor([float(number == self.signals.received) for number in self._order])
        of_all = cast(HasWorld, pl_module).world.sum(own.to(pl_module.device)).tolist()
        self.agreed = next((number for number, ranks in zip(self._order, of_all, strict=True) if ranks), None)
        if self.agreed is None:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutCheckpoint) and callback.save_top_k != 0:
                callback.save(trainer)
                self._saved = True
        trainer._signal_connector.received_sigterm = True  # Lightning's loops now end the run by SIGTERMException

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out a validation that falls on the last step."""
        if self.agreed is not None:
            self.end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows can be repeated, so signals are obeyed at once."""
        self.signals.obey(" after the last optimiser step; for the scores: validate --ckpt_path last")

    def end(self, trainer: Trainer) -> NoReturn:
        """End the run on which all ranks agreed, and let SLURM run it again if the signal means that.

        Raises:
            Stopped: always.
        """
        assert self.agreed is not None
        line = f"stopped by {self.agreed.name} after optimiser step {trainer.global_step}"
        status = status_of(self.agreed)
        environment = _environment(trainer)
        if not self._saved:
            line += "; nothing is saved (trainer.enable_checkpointing=false or checkpoint.save_top_k=0)"
        elif trainer.global_step == trainer.max_steps:
            line += ", the last one, which is saved; for the scores: validate --ckpt_path last"
        elif _requeues(environment, self.agreed):
            job = slurm_job()
            refused = requeue(job) if trainer.is_global_zero else None
            line += f", which is saved; SLURM job {job} " + (
                f"could not be requeued ({refused}): go on with --ckpt_path last" if refused else "is queued again"
            )
            status = status if refused else 0
        else:
            line += ", which is saved; go on with --ckpt_path last"
        if isinstance(environment, LightningEnvironment) and trainer.local_rank > 0:
            status = 0  # the process that started it, and reports for all, would take another status for a crash
        raise Stopped(line, status, agreed=True)


def _environment(trainer: Trainer) -> ClusterEnvironment:
    return trainer._accelerator_connector.cluster_environment


def _requeues(environment: ClusterEnvironment, number: signal.Signals) -> bool:
    return (
        isinstance(environment, SLURMEnvironment)
        and environment.auto_requeue
        and number == _requeue_signal(environment)
    )


def _requeue_signal(environment: ClusterEnvironment) -> signal.Signals:
    """Return the signal that announces the end of the time limit: SIGUSR1, unless SLURM's environment names another."""
    named = environment.requeue_signal if isinstance(environment, SLURMEnvironment) else None
    return named or signal.SIGUSR1


def _by_urgency(environment: ClusterEnvironment) -> tuple[signal.Signals, ...]:
    """Return the signals that end a run; the one that requeues wins over SIGTERM, which SLURM sends later."""
    return tuple(dict.fromkeys((_requeue_signal(environment), signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)))
