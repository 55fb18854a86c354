"""The trainer's weights into the rollout engine, proven, before each rollout."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import TrainStep
from app.sync.synchroniser import SyncReport, Verify, WeightSynchroniser
from app.training.module import GRPOModule


class WeightSync(Callback):
    """Sends the weights when `global_step` has changed and the next rollout or a validation is about to begin.

    Every micro-batch ends in `on_train_batch_end`, so the number of calls says nothing: `global_step` is the version.
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
        self._synchroniser: WeightSynchroniser | None = None
        self._canary_abs_diff: float | None = None

    @property
    def record(self) -> dict[str, Any]:
        """How many syncs were done and how they were verified, for the summary."""
        count = self._synchroniser.syncs if self._synchroniser else 0
        return {"count": count, "verify": self.verify, "canary_abs_diff_mean": self._canary_abs_diff}

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
        if self._synchroniser is None:
            datamodule = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
            self._synchroniser = WeightSynchroniser(
                datamodule.engine,
                verify=self.verify,
                canary_every=self.canary_every,
                compute_dtype=pl_module.scorer.compute_dtype,
                requests=datamodule.canary_requests(),
            )
            datamodule.recovery.resync = lambda: self._send(trainer, pl_module)
        report = self._send(trainer, pl_module)
        pl_module.timers.add("sync", report.seconds + report.verify_seconds)

    def _send(self, trainer: Trainer, pl_module: GRPOModule) -> SyncReport:
        """Send the weights, to engines started anew if one failed, and log how it went."""
        recovery = cast(RolloutDataModule, trainer.datamodule).recovery  # type: ignore[attr-defined]
        synchroniser = self._synchroniser
        assert synchroniser is not None
        report = recovery.repeat(
            lambda: synchroniser.sync(pl_module.policy, trainer.global_step, pl_module.scorer.score_completions)
        )
        if report.canary is not None:
            self._canary_abs_diff = report.canary.mean_abs_diff
        for logger in trainer.loggers:
            logger.log_metrics(report.metrics, trainer.global_step)
        return report
