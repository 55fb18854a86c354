"""GRPO as a LightningModule: hooks over the classes that do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from app.distributed.gradients import gradients_of, undone_divisions
from app.guards.nonfinite import NonFiniteConfig, NonFiniteGuard, replay_command
from app.guards.run_control import RunControl
from app.maths.objective import LossConfig
from app.policy.loading import Attention, Dtype, check_same_model, load_policy, load_teacher, recompute_layers
from app.policy.lora import LoraSettings, add_adapters
from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import EvalStep, TrainStep
from app.training.checks import check_data, check_module
from app.training.meters import EvalMeters, StepMeters
from app.training.optimiser import OptimConfig, build_optimiser, build_schedule
from app.training.resume import Continuation
from app.training.scorer import RowScorer
from app.training.settings import CorrectionSettings, DiagnosticsSettings
from app.training.step_correction import StepCorrection
from app.training.step_gradient import StepGradient
from app.training.step_log import StepLog
from app.training.step_output import Corrected, StepOutput
from app.training.timers import Timers
from app.world import World


class GRPOModule(LightningModule):
    """Group Relative Policy Optimization of a causal language model, with the engine mismatch corrected.

    Group-relative advantages: DeepSeekMath (arXiv:2402.03300). Loss forms: see LossConfig. Correction: see
    CorrectionConfig. The order of an optimiser step: see StepLog.
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
        check_module(loss, off_policy_sequence_mask_delta, teacher_model_name_or_path)
        self.model_name_or_path = model_name_or_path
        self.loss = loss
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
        self._loading = (model_name_or_path, dtype, attn_implementation)
        self.world = World()
        # Plain objects, no modules: a reference among the module's parameters would be trained and saved.
        self.run_control = RunControl(correction.resolve(), loss)
        self.step_correction = StepCorrection(self.run_control, loss, off_policy_sequence_mask_delta)
        self.scorer = RowScorer(
            self.step_correction, temperature=temperature, micro_batch_tokens=micro_batch_tokens, world=self.world
        )
        self.timers = Timers()
        self.meters: StepMeters
        self.eval_meters = EvalMeters(self.world)
        self._step_log = StepLog()
        self._continuation = Continuation(self.world)
        self._guard: NonFiniteGuard
        self._step_gradient: StepGradient

    def setup(self, stage: str) -> None:
        """Load the policy, and the frozen reference if the loss has a KL penalty."""
        if not hasattr(self, "policy"):  # `fit` may follow `validate`
            self.policy = load_policy(*self._loading)
            if self.lora is not None:
                add_adapters(self.policy, self.lora)
            if self.gradient_checkpointing:
                recompute_layers(self.policy)
        self.scorer.attach(self.policy, self._trainer)
        if self.loss.beta > 0 and stage == "fit" and not self.scorer.has_reference:
            self.scorer.attach_reference(self._frozen_reference())

    def _frozen_reference(self) -> PreTrainedModel:
        """A model with the weights of the start, also on resume; under LoRA the policy, its adapters switched off."""
        if self.teacher_model_name_or_path is not None:
            return load_teacher(self.teacher_model_name_or_path, *self._loading)
        return load_policy(*self._loading) if self.lora is None else self.policy

    def on_fit_start(self) -> None:
        """Prepare what needs the Trainer and the reward functions; move the reference to the device."""
        trainer = cast(Any, self.trainer)
        datamodule: RolloutDataModule = trainer.datamodule
        check_data(datamodule, self.loss, self.run_control.correction)
        self.run_control.check()
        self._guard = NonFiniteGuard(
            self.non_finite,
            Path(trainer.default_root_dir),
            self.world,
            settings=lambda: self.loss_settings,
            decode=lambda ids: str(datamodule.tokenizer.decode(list(ids))),
            replay=replay_command(trainer),
        )
        self.scorer.place_reference(self.device)
        self._step_gradient = StepGradient(
            gradients_of(trainer.strategy, self.parameters()),
            self._guard,
            self.run_control,
            self.world,
            judges_norm=not str(trainer.precision).startswith("16-"),
        )
        self.meters = StepMeters(datamodule.rewards.names).to(self.device)

    def on_train_start(self) -> None:
        """Go on from the checkpoint, if there is one."""
        self._step_log.begin(self.trainer)
        self._continuation.restore(cast(Any, self.trainer).train_dataloader, self.meters, self._guard)
        self.run_control.apply(cast(Any, self.trainer).lr_scheduler_configs[0].scheduler)

    def on_train_batch_start(self, step: TrainStep, batch_idx: int) -> None:
        """Take in the report of a new rollout, and start the clock."""
        self.run_control.begin_batch(step.batch.ends_rollout)
        if step.report is not None:
            self.meters.rollout(step.report)
            self.timers.add_rollout(step.report)
        accumulate = self.trainer.accumulate_grad_batches
        self.timers.add_tokens(step.batch.totals.tokens / accumulate)
        if accumulate > 1 and batch_idx % accumulate == 0:
            self._continuation.window_starts(self.meters)
        self.timers.start_update()

    def training_step(self, step: TrainStep, batch_idx: int) -> StepOutput:
        """Return the loss of one micro-batch, and for callbacks what correction and off-policy mask made of it."""
        batch, now = step.batch, self.global_step
        new, entropy = self.scorer.logprobs(batch, with_entropy=True)
        corrected, parts = self.step_correction.objective(batch, new)
        self._step_gradient.watch(batch, new, parts)
        self.meters.update(batch, corrected, entropy, parts, step=now, detailed=self.diagnostics.are_due(now))
        return {"loss": parts.loss * undone_divisions(self.trainer, self.world), "corrected": Corrected(corrected)}

    @property
    def loss_settings(self) -> dict[str, Any]:
        """What the loss of given rows depends on, as plain values by the keys of the configuration."""
        return {
            "model.model_name_or_path": self.model_name_or_path,
            "model.dtype": self.dtype_name,
            "model.temperature": self.temperature,
            **self.step_correction.settings,
        }

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note the gradient norm before clipping; leave the step out if nothing was left to train on, or not finite."""
        self._step_gradient.judge(self.global_step + 1, optimizer.param_groups[0]["lr"], self.meters)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Set the next rate and close the optimiser step: Lightning calls this once a step, before any callback."""
        super().lr_scheduler_step(scheduler, metric)
        self._step_log.close(self.trainer, scheduler, self.meters, self.timers, self.run_control)

    def on_train_batch_end(self, outputs: Any, step: TrainStep, batch_idx: int) -> None:
        """Log, and end a run that is to stop: its last step is saved by now.

        Raises:
            LockstepError: if the run cannot go on.
        """
        self.timers.stop_update()
        self._step_log.end_batch(self.trainer, self.timers)
        if self.run_control.stop is not None:
            raise self.run_control.stop
        if shown := self._step_log.take_shown():
            self.log_dict(shown, prog_bar=True, logger=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the run needs to go on exactly."""
        if hasattr(self, "meters") and "loops" in checkpoint:
            self._step_log.write(self.trainer, self.timers)  # or the run that goes on would never log them
            accumulate = self.trainer.accumulate_grad_batches
            self._continuation.save(checkpoint, self.meters, self._guard, self.run_control, accumulate)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take in a checkpoint.

        Raises:
            LockstepError: if it is of another model, or of a run that cannot go on here.
        """
        check_same_model(self, checkpoint.get("state_dict"))
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._continuation.load(checkpoint, self.run_control)

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
