"""The trainer's weights into the rollout engine, proven, before each rollout."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import TrainStep
from app.sync.canary import canary_requests
from app.sync.synchroniser import SyncReport, Verify, WeightSynchroniser
from app.training.module import GRPOModule


class LoggedSender:
    """Sends the weights of a module by a synchroniser and logs how it went: a `WeightSender`."""

    def __init__(self, synchroniser: WeightSynchroniser, trainer: Trainer, pl_module: GRPOModule) -> None:
        self.synchroniser = synchroniser
        self.trainer = trainer
        self.pl_module = pl_module
        self.canary_abs_diff: float | None = None
        """Mean |engine - trainer| of the last canary, nats; None: none has run."""

    def is_of(self, trainer: Trainer, pl_module: GRPOModule) -> bool:
        """Whether it sends this module's weights as this trainer counts its steps."""
        return self.trainer is trainer and self.pl_module is pl_module

    def send(self) -> SyncReport:
        """Send the weights that the module has now. All ranks must call it together.

        Raises:
            EngineError, SyncError: as `WeightSynchroniser.sync`.
        """
        step = self.trainer.global_step
        report = self.synchroniser.sync(self.pl_module.policy, step, self.pl_module.scorer.score_completions)
        if report.canary is not None:
            self.canary_abs_diff = report.canary.mean_abs_diff
        for logger in self.trainer.loggers:
            logger.log_metrics(report.metrics, step)
        return report


class WeightSync(Callback):
    """Sends the weights when `global_step` has changed and the next rollout or a validation is about to begin.

    Every micro-batch ends in `on_train_batch_end`, so the number of calls is no version: `global_step` is.
    """

    def __init__(self, verify: Verify = "checksum", canary_every: int = 50) -> None:
        """Configure the proof.

        Args:
            verify: off: trust the engine. checksum: after every sync compare every parameter's bits as the engine
                uses them, and at the first sync and every `canary_every` syncs let the engine sample a few tokens
                and compare their log-probabilities with the trainer's. logprobs: do both after every sync.
            canary_every: syncs between two canaries under `checksum`.
        """
        if canary_every < 1:
            raise ValueError(f"weight_sync.canary_every={canary_every}: must be at least 1")
        self.verify: Verify = verify
        self.canary_every = canary_every
        self._sender: LoggedSender | None = None

    @property
    def record(self) -> dict[str, Any]:
        """How many syncs were done and how they were verified, for the summary."""
        return {
            "count": self._sender.synchroniser.syncs if self._sender else 0,
            "verify": self.verify,
            "canary_abs_diff_mean": self._sender.canary_abs_diff if self._sender else None,
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send the weights the run starts or goes on with."""
        self._sync(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Send new weights once the rollout is used up."""
        if batch.batch.ends_rollout:
            self._sync_if_changed(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the trainer's weights, not those of the last rollout."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._sync_if_changed(trainer, pl_module)
        else:  # a checkpoint may have been loaded without a change of `global_step`
            self._sync(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Test the trainer's weights."""
        self._sync(trainer, pl_module)

    def _sync_if_changed(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
        if datamodule.engine.policy_version != trainer.global_step:
            self._sync(trainer, pl_module)

    def _sync(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
        if self._sender is None or not self._sender.is_of(trainer, pl_module):
            synchroniser = WeightSynchroniser(
                datamodule.engine,
                pl_module.world,
                verify=self.verify,
                canary_every=self.canary_every,
                compute_dtype=pl_module.scorer.compute_dtype,
                requests=canary_requests([p.token_ids for p in datamodule.first_prompts], datamodule.seed),
            )
            self._sender = LoggedSender(synchroniser, trainer, pl_module)
            datamodule.recovery.connect(self._sender)
        report = datamodule.recovery.repeat(self._sender.send)
        pl_module.timers.add("sync", report.seconds + report.verify_seconds)
