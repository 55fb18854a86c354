"""The LightningDataModule: prompts, rewards and engine from a config to loaders."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn

from app.builtin.models import resolve_model
from app.data.prompts import tokenize_prompts
from app.data.sources import PromptSource, load_rows
from app.data.tokenizer import load_tokenizer
from app.engine.protocol import Engine
from app.engine.recovery import EngineRecovery
from app.engine.vllm.engine import VLLMEngine
from app.errors import DataError
from app.maths.advantages import Scale
from app.rewards.load import RewardError
from app.rewards.weighted_sum import RewardSpec, RewardSum
from app.rollout.collector import Collector
from app.rollout.eval_loader import EvalLoader
from app.rollout.loader import RolloutLoader
from app.rollout.plan import RewardAggregation, RolloutPlan
from app.rollout.policy import Policy
from app.rollout.sampler import PromptStream
from app.types import Prompt, SamplingConfig
from app.world import World


class RolloutDataModule(LightningDataModule):
    """Prompts in, sampled and rewarded completions out."""

    def __init__(
        self,
        rewards: tuple[RewardSpec, ...] | None = None,
        train: PromptSource | None = None,
        val: PromptSource | None = None,
        model_name_or_path: str = "lockstep/addition-1m",
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
        val_sampling: SamplingConfig = SamplingConfig(temperature=0.0),  # noqa: B008
        engine: Engine | None = None,
        prompts_per_rollout: int = 32,
        num_generations: int = 8,
        mini_batches: int = 1,
        num_iterations: int = 1,
        scale_rewards: Scale = "group",
        leave_one_out: bool = False,
        multi_objective_aggregation: RewardAggregation = "sum_then_normalize",
        resample_zero_std: int = 0,
        mask_truncated_completions: bool = False,
        top_entropy_quantile: float = 1.0,
        max_prompt_tokens: int = 1024,
        overlong_prompts: Literal["error", "drop"] = "error",
        chat_template_kwargs: dict[str, Any] | None = None,
        val_batch_size: int = 256,
        max_engine_restarts: int = 3,
        seed: int = 1,
    ) -> None:
        """Hold the settings; files are read and the engine is started by `setup`.

        Args:
            rewards: reward functions and their weights; null: none, which is enough for an audit only.
            train: prompts to train on.
            val: held-out prompts, for validate, test and the before/after summary; null: none.
            model_name_or_path: whose tokenizer and weights the engine uses; set from model.model_name_or_path.
            sampling: how training completions are drawn.
            val_sampling: how validation completions are drawn; greedy by default.
            engine: what samples; vLLM by default.
            prompts_per_rollout: prompts of one rollout, over all ranks.
            num_generations: completions per prompt (the group).
            mini_batches: optimiser steps of one pass over a rollout.
            num_iterations: passes over a rollout.
            scale_rewards: which standard deviation divides the advantages.
            leave_one_out: whether the baseline of a row leaves the row itself out (RLOO).
            multi_objective_aggregation: sum_then_normalize: advantages of the weighted sum of the rewards.
                normalize_then_sum: each reward is normalised in its group first, then summed (GDPO, arXiv 2601.05242),
                so that a reward of small spread is not drowned by one of large spread.
            resample_zero_std: how often groups whose rewards are all equal are replaced by groups of new prompts
                (DAPO's dynamic sampling, with a bound).
            mask_truncated_completions: keep completions that were cut by the length limit out of the loss (DAPO's
                overlong filtering); they still count in their group's baseline.
            top_entropy_quantile: share of a rollout's tokens, those of the highest entropy, that the loss may use
                (arXiv 2506.01939; 0.2 there); 1: all.
            max_prompt_tokens: most tokens of a prompt, chat template included.
            overlong_prompts: what to do with longer ones.
            chat_template_kwargs: more arguments of the chat template, such as {enable_thinking: false}.
            val_batch_size: validation prompts of one engine call.
            max_engine_restarts: how often in a row an engine that died or hangs is started anew, with the current
                weights, and its rollout repeated, before the run ends.
            seed: of prompt order and sampling; set from seed_everything.
        """
        super().__init__()
        if num_generations < 2:
            raise ValueError(f"data.num_generations={num_generations}: a group needs at least 2 completions")
        for name, value in (
            ("prompts_per_rollout", prompts_per_rollout),
            ("mini_batches", mini_batches),
            ("num_iterations", num_iterations),
            ("val_batch_size", val_batch_size),
        ):
            if value < 1:
                raise ValueError(f"data.{name}={value}: must be at least 1")
        if resample_zero_std < 0:
            raise ValueError(f"data.resample_zero_std={resample_zero_std}: must be 0 or more")
        if not 0 < top_entropy_quantile <= 1:
            raise ValueError(f"data.top_entropy_quantile={top_entropy_quantile}: must be above 0 and at most 1")
        if multi_objective_aggregation == "normalize_then_sum" and (scale_rewards != "group" or leave_one_out):
            raise ValueError(
                "data.multi_objective_aggregation=normalize_then_sum normalises each reward by its group; it needs "
                "data.scale_rewards=group and data.leave_one_out=false"
            )
        self.train_source = train
        self.val_source = val
        self.model_name_or_path = model_name_or_path
        self.sampling = sampling
        self.val_sampling = val_sampling
        self.engine = engine or VLLMEngine()
        self._plan = RolloutPlan(
            prompts_per_rollout=prompts_per_rollout,
            num_generations=num_generations,
            mini_batches=mini_batches,
            num_iterations=num_iterations,
            accumulate=1,
            scale_rewards=scale_rewards,
            leave_one_out=leave_one_out,
            multi_objective_aggregation=multi_objective_aggregation,
            resample_zero_std=resample_zero_std,
            mask_truncated_completions=mask_truncated_completions,
            top_entropy_quantile=top_entropy_quantile,
        )
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong_prompts: Literal["error", "drop"] = overlong_prompts
        self.chat_template_kwargs = chat_template_kwargs
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.rewards = RewardSum(rewards or ())
        self.world = World()
        self.recovery = EngineRecovery(self.engine, self.world, max_engine_restarts)
        self._prompts: dict[str, list[Prompt]] = {}
        self._started = False

    def check(self) -> None:
        """Refuse what can be audited but not trained with.

        Raises:
            ValueError: naming the setting.
        """
        self.sampling.check_trainable()
        if not self.rewards.functions:
            raise RewardError("data.rewards: no reward functions; name at least one, e.g. [{function: exact_match}]")

    def setup(self, stage: str) -> None:
        """Read the prompts that `stage` needs and start the engine."""
        self.check()
        self.read_prompts(training=stage == TrainerFn.FITTING)
        if not self._started:
            self.engine.start(resolve_model(self.model_name_or_path), self.seed)
            self._started = True
        self.collector = Collector(self.recovery, self.rewards, self.tokenizer, self.seed)

    def read_prompts(self, training: bool) -> None:
        """Read and tokenise the sources, once: a fault in the data should show before anything slow begins."""
        if not self._prompts:
            self.tokenizer = load_tokenizer(self.model_name_or_path)
        if training:
            if self.train_source is None:
                raise DataError(
                    "data.train: no prompts to train on; give a source, e.g. data.train.path: prompts.jsonl"
                )
            self._read("train", self.train_source)
        self._read("val", self.val_source)

    def _read(self, name: str, source: PromptSource | None) -> None:
        if source is not None and name not in self._prompts:
            self._prompts[name] = tokenize_prompts(
                load_rows(source),
                self.tokenizer,
                self.max_prompt_tokens,
                source.path,
                overlong=self.overlong_prompts,
                chat_template_kwargs=self.chat_template_kwargs,
            )
            self.rewards.check_columns(self._prompts[name][0].columns)

    def plan(self, accumulate: int = 1) -> RolloutPlan:
        """Return how rollouts are cut, with `accumulate` micro-batches per optimiser step."""
        return dataclasses.replace(self._plan, accumulate=accumulate)

    def prompts(self, name: Literal["train", "val"]) -> list[Prompt]:
        """Return the prompts of a source that was read."""
        return self._prompts[name]

    @property
    def first_prompts(self) -> list[Prompt]:
        """The prompts of the source that was read first: in a fit those to train on."""
        return next(iter(self._prompts.values()))

    def train_dataloader(self) -> RolloutLoader:
        """The sized, stateful loader that samples rollouts."""
        trainer = self._trainer
        plan = self.plan(trainer.accumulate_grad_batches)
        plan.check(self.world.size)
        return RolloutLoader(
            self.collector,
            PromptStream(self._prompts["train"], self.seed),
            plan,
            self.sampling,
            cast(Policy, trainer.lightning_module.scorer),
            cast(int, self.tokenizer.pad_token_id),
            self.world,
        )

    def val_dataloader(self) -> EvalLoader | list[Any]:
        """Samples of the validation prompts; an empty list without any."""
        if "val" not in self._prompts:
            if self._trainer.state.fn != TrainerFn.FITTING:
                raise DataError("data.val: no validation prompts; give a source, e.g. data.val.path: held_out.jsonl")
            return []
        return EvalLoader(
            self.collector,
            self._prompts["val"],
            self.val_sampling,
            cast(Policy, self._trainer.lightning_module.scorer),
            self.world,
            self.val_batch_size,
        )

    def test_dataloader(self) -> EvalLoader | list[Any]:
        """The validation prompts, for `test`."""
        return self.val_dataloader()

    @property
    def _trainer(self) -> Any:
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule needs a Trainer: pass it to trainer.fit(module, datamodule=...)")
        return self.trainer
