"""GRPO as a LightningModule: one micro-batch of sampled rows to one corrected loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from app.data.collate import collate
from app.errors import LockstepError
from app.maths.correction import Correction, correct
from app.maths.objective import LossConfig, policy_objective
from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import EvalStep, TrainStep
from app.training.loading import Attention, Dtype, load_policy, recompute_layers
from app.training.meters import EvalMeters, StepMeters
from app.training.optimiser import OptimConfig, build_optimiser, build_schedule
from app.training.phases import Phases
from app.training.scoring import completion_logprobs
from app.training.settings import CorrectionSettings
from app.types import TrainBatch, TrainRow
from app.world import World

PROGRESS = {
    "reward": "rollout/reward_mean",
    "k3_kl": "rollout_correction/k3_kl",
    "tok/s": "time/tokens_per_second",
}
"""Name on the progress bar -> key of the logged value."""


class GRPOModule(LightningModule):
    """Group Relative Policy Optimization of a causal language model, with the engine mismatch corrected.

    Group-relative advantages: DeepSeekMath (arXiv:2402.03300). Loss forms: see LossConfig. Correction: see
    CorrectionConfig.
    """

    policy: PreTrainedModel

    def __init__(
        self,
        model_name_or_path: str = "lockstep/addition-1m",
        loss: LossConfig = LossConfig(),  # noqa: B008 - frozen
        correction: CorrectionSettings = CorrectionSettings(),  # noqa: B008
        optim: OptimConfig = OptimConfig(),  # noqa: B008
        temperature: float = 1.0,
        dtype: Dtype = "float32",
        attn_implementation: Attention = "sdpa",
        micro_batch_tokens: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Hold the settings; the policy itself is loaded by `setup`.

        Args:
            model_name_or_path: a local Hugging Face folder, a Hugging Face name, or lockstep/addition-1m.
            loss: the surrogate, its clipping, the KL penalty and the reduction.
            correction: rollout correction, a preset and overrides.
            optim: AdamW and its schedule.
            temperature: divides the logits; set from data.sampling.temperature.
            dtype: of the policy's parameters.
            attn_implementation: attention kernel of the policy.
            micro_batch_tokens: most padded tokens (prompt and completion) of one forward pass; null: no limit.
            gradient_checkpointing: recompute layer activations in the backward pass to save memory.
        """
        super().__init__()
        self.model_name_or_path = model_name_or_path
        self.loss = loss
        self.correction = correction.resolve()
        self.optim = optim
        self.temperature = temperature
        self.dtype_name: Dtype = dtype
        self.attn_implementation: Attention = attn_implementation
        self.micro_batch_tokens = micro_batch_tokens
        self.gradient_checkpointing = gradient_checkpointing
        self.world = World()
        # None of these is a module attribute: Lightning would cast their float64 states and save the reference.
        self._reference: list[PreTrainedModel] = []
        self.phases = Phases()
        self.meters: StepMeters
        self.eval_meters = EvalMeters(self.world)
        self._logged_step = 0

    def setup(self, stage: str) -> None:
        """Load the policy, and the frozen reference if the loss has a KL penalty."""
        if not hasattr(self, "policy"):  # `fit` may follow `validate`
            self.policy = load_policy(self.model_name_or_path, self.dtype_name, self.attn_implementation)
            if self.gradient_checkpointing:
                recompute_layers(self.policy)
        if self.loss.beta > 0 and stage == "fit" and not self._reference:
            # from the original weights, also on resume: re-anchoring it would change the penalty silently
            reference = load_policy(self.model_name_or_path, self.dtype_name, self.attn_implementation)
            self._reference = [reference.requires_grad_(False)]

    def on_fit_start(self) -> None:
        """Prepare the meters, now that the reward functions are known, and move the reference to the device.

        Raises:
            LockstepError: if the weights are to be normalised over a batch that is cut into micro-batches.
        """
        accumulate = cast(Any, self.trainer).accumulate_grad_batches
        if self.correction.batch_normalize and accumulate > 1:
            raise LockstepError(
                f"model.correction.batch_normalize with trainer.accumulate_grad_batches={accumulate}: the mean weight "
                f"would be that of a micro-batch and the gradient would depend on the cut; set it to 1 and use "
                f"model.micro_batch_tokens to bound memory"
            )
        for model in self._reference:
            model.to(self.device)  # type: ignore[arg-type]
        self._logged_step = self.global_step
        datamodule = cast(RolloutDataModule, cast(Any, self.trainer).datamodule)
        self.meters = StepMeters(self.correction, datamodule.rewards.names).to(self.device)

    def training_step(self, step: TrainStep, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch."""
        batch = step.batch
        new, entropy = self._logprobs(self.policy, batch)
        old = new.detach() if batch.old_logprobs is None else batch.old_logprobs
        correction = self._correct(batch, old)
        parts = policy_objective(
            new,
            self._anchor(batch, old),
            batch.mask,
            batch.advantages,
            is_weights=None if correction is None else correction.is_weights,
            keep_mask=None if correction is None else correction.mask,
            weight_kl=self.correction.weight_kl,
            ref_logprobs=batch.ref_logprobs,
            config=self.loss,
            total_tokens=batch.total_tokens,
            total_rows=batch.total_rows,
        )
        self.meters.update(batch, new.detach(), old, entropy, parts, policy_lag=self.global_step - batch.policy_version)
        return parts.loss * self._gradient_scale

    @property
    def _gradient_scale(self) -> int:
        """Undo the divisions that others make: the loss is already normalised over the whole optimiser step.

        Lightning divides by accumulate_grad_batches, DeepSpeed does so once more in its own backward, and the
        strategies average gradients over ranks.
        """
        trainer = cast(Any, self.trainer)
        accumulate: int = trainer.accumulate_grad_batches
        if trainer.strategy.handles_gradient_accumulation:
            accumulate *= accumulate
        return accumulate * self.world.size

    def _anchor(self, batch: TrainBatch, old: Tensor) -> Tensor:
        """The log-probabilities that the loss takes its ratio to: old, or the rollout's under bypass."""
        if not self.correction.bypass or batch.rollout_logprobs is None:
            return old
        return torch.where(batch.rollout_logprobs.isnan(), old, batch.rollout_logprobs)

    def _correct(self, batch: TrainBatch, old: Tensor) -> Correction | None:
        """The correction that training applies; None where there is nothing to compare."""
        if batch.rollout_logprobs is None:
            rank_zero_warn("the engine gave no log-probabilities: the step runs UNCORRECTED and nothing is measured")
            return None
        return correct(old, batch.rollout_logprobs, batch.mask, self.correction, reduce=self.world.sum)

    def _logprobs(
        self,
        policy: PreTrainedModel,
        batch: TrainBatch,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return completion_logprobs(
            policy,
            batch,
            temperature=self.temperature if temperature is None else temperature,
            max_tokens=self.micro_batch_tokens,
        )

    @property
    def has_reference(self) -> bool:
        """Whether rollouts are scored by a frozen reference."""
        return bool(self._reference)

    @torch.no_grad()
    def score(self, batch: TrainBatch, old: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return old (if asked and not bypassed) and reference log-probabilities of host rows, [B, T] on the host."""
        batch = batch.to(self.device)
        with self.trainer.precision_plugin.forward_context():
            scored = self._logprobs(self.policy, batch)[0].cpu() if old and not self.correction.bypass else None
            reference = [self._logprobs(model, batch)[0].cpu() for model in self._reference]
        return scored, reference[0] if reference else None

    @torch.no_grad()
    def score_completions(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[float]]:
        """Return the policy's log-probabilities of completions at temperature 1, for the sync's canary.

        Args:
            rows: (prompt ids, completion ids) of each row.
        """
        batch = collate(
            [
                TrainRow(prompt_ids=prompt, completion_ids=ids, rollout_logprobs=None, advantage=0.0, reward=0.0)
                for prompt, ids in rows
            ],
            pad_token_id=0,
            total_tokens=0,
            total_rows=0,
            policy_version=self.global_step,
            ends_rollout=False,
        ).to(self.device)
        with self.trainer.precision_plugin.forward_context():
            logprobs, _ = self._logprobs(self.policy, batch, temperature=1.0)
        return [logprobs[i, : len(ids)].tolist() for i, (_, ids) in enumerate(rows)]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype the policy computes in: the autocast one under mixed precision, else its parameters'."""
        by_precision = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        return by_precision.get(str(self.trainer.precision), self.policy.dtype)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note the gradient norm before clipping."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if gradients:  # DeepSpeed keeps them to itself
            self.meters.grad_norm(torch.nn.utils.get_total_norm(gradients))

    def on_train_batch_start(self, step: TrainStep, batch_idx: int) -> None:
        """Take in the report of a new rollout."""
        if step.report is not None:
            self.meters.rollout(step.report)

    def on_train_batch_end(self, outputs: Any, step: TrainStep, batch_idx: int) -> None:
        """Log global values every `log_every_n_steps` optimiser steps, and at the last one."""
        done = self.global_step
        if done == self._logged_step:
            return  # inside an accumulation window
        trainer = cast(Any, self.trainer)
        if done % trainer.log_every_n_steps == 0 or done == trainer.max_steps:
            self._logged_step = done
            values = {**self.meters.compute_and_reset(), **self.phases.read()}
            for logger in self.trainer.loggers:
                logger.log_metrics(values, step=done)
            shown = {name: values[key] for name, key in PROGRESS.items() if key in values}
            self.log_dict(values, logger=False)  # for callbacks that monitor a value
            self.log_dict(shown, prog_bar=True, logger=False)

    def validation_step(self, step: EvalStep, batch_idx: int) -> None:
        """Take in the rewards of some validation samples."""
        self.eval_meters.update(step.samples)

    def on_validation_epoch_end(self) -> None:
        """Log the means over all ranks' samples, as `val/...`."""
        self.log_dict(self.eval_meters.compute_and_reset("val"))

    def test_step(self, step: EvalStep, batch_idx: int) -> None:
        """Take in the rewards of some test samples."""
        self.eval_meters.update(step.samples)

    def on_test_epoch_end(self) -> None:
        """Log the means over all ranks' samples, as `test/...`."""
        self.log_dict(self.eval_meters.compute_and_reset("test"))

    def configure_optimizers(self) -> Any:
        """AdamW and its schedule, stepped once per optimiser step."""
        optimiser = build_optimiser(self.policy.parameters(), self.optim)
        schedule = build_schedule(optimiser, self.optim, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
