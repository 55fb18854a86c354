"""The audit from end to end: sample, score, compare, measure the noise, and find the cause."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from app.audit.attribution.attribution import floor, summary, verdict
from app.audit.attribution.checks import all_checks
from app.audit.attribution.compare import compare
from app.audit.attribution.factors import Pipeline
from app.audit.attribution.noise import expected_cost, measure_noise
from app.audit.attribution.rounds import Attribution
from app.audit.gates import gates
from app.audit.measure import DECODE_COST, SCORE_COST, START_COST, Measurements
from app.audit.progress import Progress
from app.audit.sides.condition import Condition, EngineCondition, TrainerCondition
from app.audit.sides.engine_side import EngineSide, token_scores
from app.audit.sides.sampling import EFFORTS, Mode, Sampled, plan_requests, sample_rows
from app.audit.sides.trainer_side import TrainerSide
from app.audit.types import Audit, Check, Distance, TokenScores
from app.builtin.models import resolve_model
from app.data.collate import collate, row_to_score
from app.data.end_tokens import eos_by_source
from app.engine.protocol import Engine
from app.errors import listed
from app.policy.loading import Dtype
from app.policy.saving import save_policy
from app.rollout.datamodule import RolloutDataModule
from app.sync.synchroniser import WeightSynchroniser
from app.training.module import GRPOModule
from app.versions import versions
from app.weights.checksum import checksum, with_tied
from app.weights.gather import named_full_parameters
from app.weights.names import hf_name


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What an audit examines: model, prompts, engine and precision."""

    module: GRPOModule
    """The training module, set up with the checkpoint's weights."""
    datamodule: RolloutDataModule
    """The data module: prompts loaded, engine not started."""
    checkpoint: str | None
    """Path of the checkpoint with the weights; None: the model's own weights."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Context for mixed precision, from the Trainer."""
    compute_dtype: Dtype
    """Dtype that the trainer computes in within `autocast`."""
    device: torch.device
    """Device that the trainer computes on."""


def audit(
    subject: Subject,
    *,
    mode: Mode = "quick",
    rows: int | None = None,
    bounds: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Sample with the engine, score the same ids with the trainer, and report whether, how much and why they differ.

    Args:
        subject: what to audit; its engine is closed at the end.
        mode: how much to do, see `EFFORTS`.
        rows: number of completions; None: as many as the mode needs.
        bounds: bounds by key, from --fail-above.
        progress: the progress bar; None: not shown.

    Raises:
        LockstepError: if the engine cannot start or sample, or returns no log-probabilities.
    """
    progress = progress or Progress(shown=False)
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as folder:
        work = _Audit(subject, mode, rows, Path(folder), progress)
        try:
            return work.run(bounds or {})
        finally:
            work.close()
            progress.close()


class _Audit:
    """One audit under way."""

    def __init__(self, subject: Subject, mode: Mode, rows: int | None, folder: Path, progress: Progress) -> None:
        self.subject = subject
        self.module = subject.module
        self.datamodule = subject.datamodule
        self.mode: Mode = mode
        self.effort = EFFORTS[mode]
        self.asked_rows = rows
        self.folder = folder
        self.progress = progress
        self.notes: list[str] = []
        self.engine = self.datamodule.engine
        self.measured: Measurements

    def close(self) -> None:
        """Free the engine."""
        if hasattr(self, "measured"):
            self.measured.engine.close()
        self.engine.close()

    def run(self, bounds: Mapping[str, float]) -> Audit:
        self.progress.expect(START_COST + 2 * DECODE_COST + 2 * SCORE_COST)
        sampled = self._sample()
        measured = self.measured = self._measurements(sampled)
        mismatch = self._mismatch()
        pipeline = self._pipeline(sampled)
        self.progress.expect(expected_cost(pipeline, len(sampled.rows)))
        tokens = sum(len(row.prompt_ids) + len(row.completion_ids) for row in sampled.rows)
        noise = tuple(measure_noise(measured, pipeline, len(sampled.rows), tokens))
        least = floor(noise)
        found = verdict(mismatch, least)
        rounds = self._attribution(pipeline, least).rounds() if found == "mismatch" else ()
        comparison = compare(sampled.rows, self._engine_view(), self._trainer_view(), self.datamodule.tokenizer)
        checks = self._checks(sampled, measured.engine.consumed_prompts())
        return Audit(
            verdict=found,
            summary=summary(verdict=found, comparison=comparison, floor=least, rounds=rounds, checks=checks),
            mode=self.mode,
            settings=self._settings(sampled),
            checks=checks,
            comparison=comparison,
            noise=noise,
            floor=least,
            rounds=rounds,
            gates=gates(bounds, comparison),
            seconds=self.progress.seconds,
            notes=tuple(self.notes),
        )

    def _sample(self) -> Sampled:
        """Start the engine as training does, send the weights, and sample."""
        self._prompts = self.datamodule.prompts("train" if self.datamodule.train_source is not None else "val")
        requests, sampling = plan_requests(
            self._prompts, self.datamodule.sampling, self.effort, self.asked_rows, self.datamodule.seed
        )
        with self.progress.stage("engine: start", START_COST):
            save_policy(self.module.policy, self.module.model_name_or_path, self.folder)
            self._shorten_context(max(len(request.token_ids) for request in requests) + sampling.max_tokens)
            if self._quantized:
                self.engine.start(str(self.folder), self.datamodule.seed)  # its weights cannot be sent
            else:
                self.engine.start(resolve_model(self.module.model_name_or_path), self.datamodule.seed)
                self._send(self.engine)
        self._weight_layout = self.engine.weight_layout()
        with self.progress.stage("engine: sample", DECODE_COST):
            return sample_rows(self.engine, requests, sampling)

    def _shorten_context(self, tokens: int) -> None:
        """Set the engine's context to so many tokens where none is configured: its cache must hold a whole sequence."""
        if self.engine.arguments.get("max_model_len", tokens) is None:
            self.engine = self.engine.variant(max_model_len=tokens + 1)

    @property
    def _quantized(self) -> bool:
        return self.engine.arguments.get("quantization") is not None

    @property
    def _engine_dtype(self) -> Dtype:
        """Dtype of most of the engine's weights: what `auto` became."""
        ((most, _),) = Counter(self._weight_layout.dtypes.values()).most_common(1)
        return cast(Dtype, str(most).removeprefix("torch."))

    @property
    def _engine_vocabulary(self) -> int | None:
        """Number of logits in the engine; None: its head has another name than the trainer's."""
        head = self.module.policy.get_output_embeddings().weight
        names = [hf_name(name) for name, p in self.module.policy.named_parameters(remove_duplicate=False) if p is head]
        return next((self._weight_layout.shapes[name][0] for name in names if name in self._weight_layout.shapes), None)

    @property
    def _experts(self) -> bool:
        """Whether the policy is a mixture of experts."""
        config = self.module.policy.config.get_text_config()
        return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))

    def _expected_checksums(self) -> dict[str, int]:
        """Checksums of the trainer's weights in the engine's dtype, tied weights under every name."""
        dtypes, policy = self._weight_layout.dtypes, self.module.policy
        sums = {
            name: checksum(tensor, dtypes[name])
            for name, tensor in named_full_parameters(policy, dtypes)
            if name in dtypes
        }
        return with_tied(sums, policy)

    def _send(self, engine: Engine) -> None:
        WeightSynchroniser(engine, self.module.world, verify="off").sync(self.module.policy, 0)

    def _measurements(self, sampled: Sampled) -> Measurements:
        trainer = TrainerSide(
            self.module.policy.to(self.subject.device),  # type: ignore[arg-type]
            sampled.rows,
            temperature=sampled.sampling.temperature,
            micro_batch_tokens=self.module.micro_batch_tokens,
            pad_token_id=cast(int, self.datamodule.tokenizer.pad_token_id),
            autocast=self.subject.autocast,
            device=self.subject.device,
        )
        engine = EngineSide(
            self.engine,
            sampled.requests,
            [row.completion_ids for row in sampled.rows],
            sampled.sampling,
            model_path=self.folder,
            send=self._send,
            seed=self.datamodule.seed,
            experts=self._experts,
            pinned={"dtype": self._engine_dtype} if self.engine.arguments.get("dtype") == "auto" else None,
        )
        return Measurements(sampled.scores, engine, trainer, self.progress)

    def _mismatch(self) -> Distance:
        """The mismatch as configured; the pass over single rows also finds the trainer's likeliest tokens."""
        with self.progress.stage("trainer: score", 2 * SCORE_COST):
            for condition in (TrainerCondition(arrangement="single_rows"), TrainerCondition()):
                self.measured.trainer.measure(condition)
        return self.measured.between(Condition(), "trainer: score")

    def _pipeline(self, sampled: Sampled) -> Pipeline:
        """What the factors depend on; temperatures and supports are fitted only after a mismatch."""
        with self.progress.stage("engine: the same tokens again", DECODE_COST):
            self.measured.engine.measure(EngineCondition())
        consumed = self.measured.engine.consumed_prompts()
        self.measured.trainer.consumed(consumed)
        self.differing = [] if self._quantized else self.measured.engine.weights_differing(self._expected_checksums())
        return Pipeline(
            engine_class=f"{type(self.engine).__module__}.{type(self.engine).__qualname__}",
            engine_arguments=self.engine.arguments,
            engine_dtype=self._engine_dtype,
            quantized=self._quantized,
            trainer_dtype=self.subject.compute_dtype,
            attention=self.module.attn_implementation,
            sampling=sampled.sampling,
            lora=self.module.lora is not None,
            experts=self._experts,
            prompts_changed=[row.prompt_ids for row in sampled.rows] != list(consumed),
            weights_proven=not (self.differing or self._quantized or self._weight_layout.opaque),
            engine_temperature=sampled.sampling.temperature,
            trainer_temperature=sampled.sampling.temperature,
            supports=(),
        )

    def _attribution(self, pipeline: Pipeline, least: Distance) -> Attribution:
        return Attribution(
            measured=self.measured,
            pipeline=pipeline,
            floor=least,
            effort=self.effort,
            differing=self.differing,
            notes=self.notes,
        )

    def _engine_view(self) -> TokenScores:
        """The engine's log-probabilities as sampled, with its likeliest tokens from decoding them again."""
        again = token_scores(self.measured.engine.measure(EngineCondition()))
        return dataclasses.replace(again, logprobs=self.measured.sampled.logprobs)

    def _trainer_view(self) -> TokenScores:
        """The trainer's log-probabilities as in training, with its likeliest tokens from rows scored one by one."""
        alone = self.measured.trainer.measure(TrainerCondition(arrangement="single_rows"))
        return dataclasses.replace(alone, logprobs=self.measured.trainer.measure(TrainerCondition()).logprobs)

    def _checks(self, sampled: Sampled, consumed: Sequence[Sequence[int]]) -> tuple[Check, ...]:
        tokenizer = self.datamodule.tokenizer
        batch = collate(
            [row_to_score(row.prompt_ids, row.completion_ids) for row in sampled.rows],
            pad_token_id=cast(int, tokenizer.pad_token_id),
        )
        by_source = eos_by_source(str(resolve_model(self.module.model_name_or_path)))
        return (
            self._weights_check(),
            *all_checks(
                rows=sampled.rows,
                prompts=self._prompts,
                consumed=consumed,
                batch=batch,
                tokenizer=tokenizer,
                eos_ids=sorted({token for ids in by_source.values() for token in ids}),
                eos_by_source=by_source,
                trainer_vocabulary=self.module.policy.get_output_embeddings().weight.shape[0],
                engine_vocabulary=self._engine_vocabulary,
                chat_template_kwargs=self.datamodule.chat_template_kwargs,
            ),
        )

    def _weights_check(self) -> Check:
        if self._quantized:
            return Check(name="weights", passed=None, detail="the engine's are quantised: they have no checksums")
        if self.differing:
            return Check(name="weights", passed=False, detail=f"the engine holds others: {listed(self.differing)}")
        return Check(name="weights", passed=True, detail="every checksum in the engine is that of the trainer")

    def _settings(self, sampled: Sampled) -> dict[str, str]:
        """What was audited, for the report."""
        source = self.datamodule.train_source or self.datamodule.val_source
        assert source is not None
        arguments = ", ".join(f"{name}={value}" for name, value in self.engine.arguments.items() if value is not None)
        drawn = [f"{f.name}={getattr(sampled.sampling, f.name)}" for f in dataclasses.fields(sampled.sampling)]
        precision = self.subject.compute_dtype
        return {
            "model": self.module.model_name_or_path,
            "checkpoint": self.subject.checkpoint or "none: the model's own weights",
            "engine": f"{type(self.engine).__name__}({arguments}), computes in {self._engine_dtype}",
            "trainer": f"{precision}, {self.module.attn_implementation} attention, on {self.subject.device}",
            "sampling": ", ".join(drawn),
            "prompts": source.path,
            "rows": f"{len(sampled.rows)} completions, {len(sampled.scores.logprobs)} tokens",
            "seed": str(self.datamodule.seed),
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        }
