"""GRPO as a LightningModule: one micro-batch of sampled rows to one corrected loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from app.data.collate import collate, row_to_score
from app.distributed.gradients import Gradients, PlainGradients, ZeroGradients
from app.errors import LockstepError
from app.guards.nonfinite import NonFiniteConfig, NonFiniteGuard, settings_of
from app.maths.correction import CorrectionConfig
from app.maths.objective import LossConfig, reward_kl_penalty
from app.policy.loading import (
    MIXED_PRECISION,
    Attention,
    Dtype,
    check_same_model,
    load_policy,
    load_teacher,
    recompute_layers,
)
from app.policy.lora import LoraSettings, adapters_off, add_adapters
from app.policy.scoring import completion_logprobs
from app.rollout.datamodule import RolloutDataModule
from app.rollout.policy import Scores
from app.rollout.steps import EvalStep, TrainStep
from app.training.correction_switch import CorrectionSwitch
from app.training.meters import EvalMeters, StepMeters
from app.training.optimiser import OptimConfig, build_optimiser, build_schedule
from app.training.resume import Continuation
from app.training.settings import CorrectionSettings, DiagnosticsSettings
from app.training.step_correction import StepCorrection, micro_batch_objective
from app.training.step_log import StepLog
from app.training.timers import Phases
from app.types import StepSums, TrainBatch
from app.world import World


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
        off_policy_sequence_mask_delta: float | None = None,
        teacher_model_name_or_path: str | None = None,
        diagnostics: DiagnosticsSettings = DiagnosticsSettings(),  # noqa: B008
        non_finite: NonFiniteConfig = NonFiniteConfig(),  # noqa: B008
        optim: OptimConfig = OptimConfig(),  # noqa: B008
        temperature: float = 1.0,
        dtype: Dtype = "float32",
        attn_implementation: Attention = "sdpa",
        micro_batch_tokens: int | None = None,
        gradient_checkpointing: bool = False,
        lora: LoraSettings | None = None,
    ) -> None:
        """Hold the settings; the policy itself is loaded by `setup`.

        Args:
            model_name_or_path: a local Hugging Face folder, a Hugging Face name, or lockstep/addition-1m.
            loss: the surrogate, its clipping, the KL penalty and the reduction.
            correction: rollout correction, a preset and overrides.
            off_policy_sequence_mask_delta: drop a row from the loss if its advantage is negative and the current policy
                gives its tokens, on average, more than this many nats less than the policy that sampled them
                (DeepSeek-V3.2); null: never.
            teacher_model_name_or_path: a frozen model that takes the reference's place in the KL term (on-policy
                distillation); null: the reference is the model that training starts from.
            diagnostics: how often the full set is computed.
            non_finite: what happens when a loss or gradient is not finite.
            optim: AdamW and its schedule.
            temperature: divides the logits; set from data.sampling.temperature.
            dtype: of the policy's parameters.
            attn_implementation: attention kernel of the policy.
            micro_batch_tokens: most padded tokens (prompt and completion) of one forward pass; null: no limit.
            gradient_checkpointing: recompute layer activations in the backward pass to save memory.
            lora: train LoRA adapters and nothing else; null: train every parameter.
        """
        super().__init__()
        if off_policy_sequence_mask_delta is not None and teacher_model_name_or_path is not None:
            raise ValueError(
                "model.off_policy_sequence_mask_delta with model.teacher_model_name_or_path: the mask goes by the sign "
                "of the reward's advantage and would drop rows that the teacher still corrects; use one of them"
            )
        if teacher_model_name_or_path is not None and not loss.beta > 0:
            raise ValueError("model.teacher_model_name_or_path does nothing without model.loss.beta above 0")
        self.model_name_or_path = model_name_or_path
        self.loss = loss
        self.corrections = CorrectionSwitch(correction.resolve(), loss, off_policy_sequence_mask_delta)
        self.teacher_model_name_or_path = teacher_model_name_or_path
        self.diagnostics = diagnostics
        self.non_finite = non_finite
        self.optim = optim
        self.temperature = temperature
        self.dtype_name: Dtype = dtype
        self.attn_implementation: Attention = attn_implementation
        self.micro_batch_tokens = micro_batch_tokens
        self.gradient_checkpointing = gradient_checkpointing
        self.lora = lora
        self.world = World()
        # None of these is a module attribute: Lightning would cast their float64 states and save the reference.
        self._reference: list[PreTrainedModel] = []
        self.phases = Phases()
        self.meters: StepMeters
        self.eval_meters = EvalMeters(self.world)
        self.step_log = StepLog()
        self._continuation = Continuation(self.world)
        self._gradients: Gradients
        self._guard: NonFiniteGuard
        self._hopeless: LockstepError | None = None
        self._trained_tokens: list[Tensor] = []  # of this rank's micro-batches of the optimiser step under way

    def setup(self, stage: str) -> None:
        """Load the policy, and the frozen reference if the loss has a KL penalty."""
        if not hasattr(self, "policy"):  # `fit` may follow `validate`
            self.policy = load_policy(self.model_name_or_path, self.dtype_name, self.attn_implementation)
            if self.lora is not None:
                add_adapters(self.policy, self.lora)
            if self.gradient_checkpointing:
                recompute_layers(self.policy)
        if self.loss.beta > 0 and stage == "fit" and not self._reference:
            # from the original weights, also on resume: re-anchoring it would change the penalty silently
            settings = (self.model_name_or_path, self.dtype_name, self.attn_implementation)
            teacher = self.teacher_model_name_or_path
            if teacher is None and self.lora is not None:
                self._reference = [self.policy]  # with its adapters off it is the model that training starts from
            else:
                reference = load_policy(*settings) if teacher is None else load_teacher(teacher, *settings)
                self._reference = [reference.requires_grad_(False)]

    def on_fit_start(self) -> None:
        """Prepare the meters, now that the reward functions are known, and move the reference to the device."""
        datamodule = cast(RolloutDataModule, cast(Any, self.trainer).datamodule)
        self.check(datamodule)
        self.step_log.step = self.global_step
        self._trained_tokens = []
        folder, tokenizer = Path(self.trainer.default_root_dir), datamodule.tokenizer
        saved = Path(self.trainer.log_dir or folder) / "config.yaml"  # by Lightning's SaveConfigCallback
        self._guard = NonFiniteGuard(
            self.non_finite,
            folder,
            self.world,
            settings_of(self),
            lambda ids: str(tokenizer.decode(list(ids))),
            replay=f"python -m app replay --config {saved} --ckpt_path last",
        )
        strategy = cast(Any, self.trainer).strategy
        zero = isinstance(strategy, DeepSpeedStrategy)
        for model in self._reference:
            if model is not self.policy:
                # DeepSpeed casts the policy; in another precision the KL penalty would not start from 0
                model.to(self.device, self.policy.dtype if zero else model.dtype)  # type: ignore[arg-type, call-overload]
        self._gradients = ZeroGradients(strategy.deepspeed_engine) if zero else PlainGradients(self.parameters())
        self.meters = StepMeters(self.correction, datamodule.rewards.names).to(self.device)

    def check(self, datamodule: RolloutDataModule) -> None:
        """Refuse settings that contradict the data module's.

        Raises:
            LockstepError: if the engine or the data module cannot give what the settings need.
        """
        if self.step_correction.changes_gradients and not datamodule.engine.returns_logprobs:
            raise LockstepError(
                f"{type(datamodule.engine).__name__} gives no log-probabilities, so nothing can be corrected: set "
                f"model.correction.preset to null, or sample with another engine"
            )
        plan = datamodule.plan()
        if self.loss.kl_in_reward and plan.multi_objective_aggregation == "normalize_then_sum":
            raise LockstepError(
                "model.loss.kl_in_reward with data.multi_objective_aggregation=normalize_then_sum: the penalty belongs "
                "to the sum of the rewards, which is never formed; set kl_in_reward to false"
            )
        if self.loss.loss_type == "reinforce" and plan.steps > 1 and not self.correction.bypass:
            rank_zero_warn(
                f"model.loss.loss_type=reinforce has no ratio to the old policy: in {plan.steps} optimiser steps a "
                "rollout the staleness stays uncorrected; use model.correction.preset=verl/bypass_pg_is, or one step"
            )

    def training_step(self, step: TrainStep, batch_idx: int) -> dict[str, Any]:
        """Return the loss of one micro-batch, and for callbacks what the off-policy mask and the correction saw."""
        batch = step.batch
        new, entropy = self._logprobs(self.policy, batch, with_entropy=True)
        corrected, parts = micro_batch_objective(batch, new, self.step_correction)
        self._guard.watch(batch, new, parts.loss)
        self._trained_tokens.append(parts.trained_tokens)
        self.meters.update(
            batch,
            corrected,
            entropy,
            parts,
            policy_lag=self.global_step - batch.policy_version,
            detailed=self.global_step % self.diagnostics.every_n_steps == 0,
        )
        off_policy = corrected.off_policy
        return {
            "loss": parts.loss * self._gradient_scale,
            "off_policy": off_policy and vars(off_policy),
            "old_logprobs": corrected.old_logprobs,
        }

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

    @property
    def step_correction(self) -> StepCorrection:
        """How a micro-batch is corrected now."""
        return self.corrections.in_force

    @property
    def correction(self) -> CorrectionConfig:
        """The rollout correction in force."""
        return self.corrections.in_force.correction

    def take_up_correction(self) -> None:
        """Put the correction that `corrections` is asked for into force, if its time has come."""
        if self.corrections.take_up() and hasattr(self, "meters"):
            self.meters.mismatch.config = self.correction
            self._guard.settings = settings_of(self)

    @property
    def needs_step_sums(self) -> bool:
        """Whether a micro-batch needs sums over its whole optimiser step."""
        return self.step_correction.needs_step_sums

    @property
    def bypass(self) -> bool:
        """Whether the rollout's log-probabilities stand in for the old ones."""
        return self.correction.bypass

    @property
    def row_settings(self) -> dict[str, object]:
        """Settings that decide what rows are scored for."""
        return {
            "model.correction.bypass": self.bypass,
            "model.loss.kl_in_reward": self.loss.kl_in_reward,
            "a KL penalty (model.loss.beta above 0)": self.has_reference,
            "sums over a step (batch_normalize or denominator=kept)": self.needs_step_sums,
        }

    def step_sums(self, batch: TrainBatch) -> StepSums:
        """Return the sums over rows that other micro-batches of the step need."""
        return self.step_correction.step_sums(batch)

    def _logprobs(
        self,
        policy: PreTrainedModel,
        batch: TrainBatch,
        temperature: float | None = None,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return completion_logprobs(
            policy,
            batch,
            temperature=self.temperature if temperature is None else temperature,
            max_tokens=self.micro_batch_tokens,
            with_entropy=with_entropy,
            in_step=self.world if self._in_step else None,
        )

    @property
    def _in_step(self) -> bool:
        """Whether each call of the model gathers weights from all ranks."""
        strategy = cast(Any, self.trainer).strategy
        return isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3

    @property
    def has_reference(self) -> bool:
        """Whether rollouts are scored by a frozen reference."""
        return bool(self._reference)

    @torch.no_grad()
    def score(self, batch: TrainBatch, *, old: bool, entropy: bool) -> Scores:
        """Return what rows, on the host, need of the policy and the reference; also on the host."""
        batch = batch.to(self.device)
        with_penalty = self.has_reference and self.loss.kl_in_reward
        policy = entropies = None
        with self.trainer.precision_plugin.forward_context():
            if old or with_penalty or entropy:
                policy, entropies = self._logprobs(self.policy, batch, with_entropy=entropy)
            reference = None
            for model in self._reference:
                with adapters_off(model):
                    reference, _ = self._logprobs(model, batch)
        penalty = None
        if with_penalty:
            assert policy is not None
            assert reference is not None
            penalty = reward_kl_penalty(policy, reference, batch.mask, self.loss).cpu()
        return Scores(
            old=policy.cpu() if policy is not None and old else None,
            ref=None if reference is None else reference.cpu(),
            entropy=entropies.cpu() if entropies is not None and entropy else None,
            reward_penalty=penalty,
        )

    @torch.no_grad()
    def score_completions(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[float]]:
        """Return the policy's log-probabilities of completions at temperature 1, for the sync's canary.

        Args:
            rows: (prompt ids, completion ids) of each row.
        """
        batch = collate(
            [row_to_score(prompt, ids) for prompt, ids in rows],
            pad_token_id=0,
        ).to(self.device)
        with self.trainer.precision_plugin.forward_context():
            logprobs, _ = self._logprobs(self.policy, batch, temperature=1.0)
        return [logprobs[i, : len(ids)].tolist() for i, (_, ids) in enumerate(rows)]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype the policy computes in: the autocast one under mixed precision, else its parameters'."""
        mixed = MIXED_PRECISION.get(str(self.trainer.precision))
        return self.policy.dtype if mixed is None else getattr(torch, mixed)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note the gradient norm before clipping; leave the step out if nothing was left to train on, or not finite."""
        if not self._gradients.complete():
            return
        trained, self._trained_tokens = torch.stack(self._trained_tokens).sum(), []
        norm = self._gradients.norm()
        # in float16 an overflow belongs to the search for a loss scale, and those who search skip the step themselves
        judged = None if str(self.trainer.precision).startswith("16-") else norm
        try:
            non_finite = self._guard.close_step(judged, self.global_step + 1)
        except LockstepError as error:  # replaying its rows takes a checkpoint
            non_finite = True
            self.end_after_step(error)
        nothing_left = not self.world.sum(trained).item()
        if self.world.rank == 0:  # all ranks have the same values
            self.meters.optimiser_step(norm, optimizer.param_groups[0]["lr"], nothing_left, non_finite)
        if nothing_left or non_finite:
            self._gradients.discard()
        if nothing_left:
            rank_zero_warn(
                f"optimiser step {self.global_step + 1}: every token was rejected or filtered out, the weights stay as "
                f"they are; the dashboard's `losses of data` say by what, widen its bounds (app/README.md)"
            )

    def end_after_step(self, error: LockstepError) -> None:
        """Let the run end with `error` when this optimiser step is over and saved. All ranks must ask for it."""
        self._hopeless, self.trainer.should_stop = error, True

    def on_train_batch_start(self, step: TrainStep, batch_idx: int) -> None:
        """Take in the report of a new rollout."""
        self.corrections.rollout_over = step.batch.ends_rollout
        if step.report is not None:
            self.meters.rollout(step.report)
        accumulate = self.trainer.accumulate_grad_batches
        if accumulate > 1 and batch_idx % accumulate == 0:
            self._continuation.window_starts(self.meters)

    def on_train_batch_end(self, outputs: Any, step: TrainStep, batch_idx: int) -> None:
        """Log when it is time.

        Raises:
            LockstepError: if the run cannot go on.
        """
        self.log_if_due()
        if self._hopeless is not None:
            raise self._hopeless
        if shown := self.step_log.take_shown():
            self.log_dict(shown, prog_bar=True, logger=False)

    def log_if_due(self) -> None:
        """Log global values if an interval has ended, and take up what is decided by them.

        For callbacks too, which come before the module's own `on_train_batch_end`. All ranks must call it together.
        """
        self.step_log.log_if_due(self.trainer, self.meters, self.phases)
        self.take_up_correction()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the run needs to go on exactly."""
        if hasattr(self, "meters") and "loops" in checkpoint:
            self.log_if_due()  # callbacks, and so checkpoints, come before the module's own `on_train_batch_end`
            checkpoint["corrections"] = self.corrections.state_dict()
            self._continuation.save(checkpoint, self.meters, self._guard, self.trainer.accumulate_grad_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take in a checkpoint.

        Raises:
            LockstepError: if it is of another model.
        """
        check_same_model(self, checkpoint.get("state_dict"))
        self._continuation.load(checkpoint)
        if "corrections" in checkpoint:
            self.corrections.load_state_dict(checkpoint["corrections"])

    def on_train_start(self) -> None:
        """Go on from the checkpoint.

        Raises:
            LockstepError: if an epoch would be cut inside an accumulation window.
        """
        trainer = cast(Any, self.trainer)
        if trainer.num_training_batches % trainer.accumulate_grad_batches:
            raise LockstepError(
                f"trainer.limit_train_batches, overfit_batches or fast_dev_run: an epoch of "
                f"{trainer.num_training_batches} micro-batches ends inside an optimiser step of "
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}; use a multiple of it"
            )
        self._continuation.restore(trainer.train_dataloader, self.meters, self._guard)
        self.step_log.step = self.global_step

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
