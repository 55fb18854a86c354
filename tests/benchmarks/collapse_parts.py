"""What the collapse experiment adds to a run: an engine with a silent fault, and a score that does not pass it."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from app.data.prompts import tokenize_prompts
from app.data.sources import PromptSource, load_rows
from app.engine.vllm.engine import VLLMEngine
from app.rollout.datamodule import RolloutDataModule
from app.rollout.steps import TrainStep
from app.training.module import GRPOModule

TASK = "lockstep/addition"
EXACT_MATCH = "experiment/exact_match"


def arrives(policy_version: int, stale_from: int, sync_every: int) -> bool:
    """Whether a `StaleEngine` takes the weights of this version."""
    since = policy_version - stale_from
    return since <= 0 or (sync_every > 0 and since % sync_every == 0)


class StaleEngine(VLLMEngine):
    """vLLM that takes new weights seldom or never, and reports that it has taken them all.

    Its log-probabilities are true: those of the distribution that the tokens were drawn from.

    Args:
        stale_from: policy version (optimiser step) from which on weights are lost; that version still arrives.
        sync_every: steps from one version that arrives to the next; 0: none arrives any more.
    """

    def __init__(self, stale_from: int = 0, sync_every: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stale_from = stale_from
        self.sync_every = sync_every

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load the weights, or only say so."""
        if arrives(policy_version, self.stale_from, self.sync_every):
            super().load_weights(weights, policy_version)
        else:
            self.policy_version = policy_version


class ExactMatch(Callback):
    """Greedy exact match of the trained policy itself on held-out sums: no engine has a part in it."""

    def __init__(self, every_n_steps: int = 5, prompts: int = 400, max_tokens: int = 8) -> None:
        """Configure the score.

        Args:
            every_n_steps: optimiser steps between two scores; there is one before the first step too.
            prompts: the first so many of the validation split, which comes shuffled.
            max_tokens: most tokens of an answer.
        """
        self.every_n_steps = every_n_steps
        self.prompts = prompts
        self.max_tokens = max_tokens
        self._scored: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the sums, and score the policy that training starts from."""
        self._tokenizer = cast(RolloutDataModule, trainer.datamodule).tokenizer  # type: ignore[attr-defined]
        rows = load_rows(PromptSource(path=TASK, split="validation", limit=self.prompts))
        prompts = tokenize_prompts(rows, self._tokenizer, 64, TASK)
        self._ids = torch.tensor([prompt.token_ids for prompt in prompts])  # all prompts are equally long
        self._answers = [row["answer"] for row in rows]
        self._score(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrainStep, batch_idx: int
    ) -> None:
        """Score when it is time."""
        if trainer.global_step % self.every_n_steps == 0 and trainer.global_step != self._scored:
            self._score(trainer, pl_module)

    @torch.no_grad()
    def _score(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._scored = trainer.global_step
        policy = cast(Any, cast(GRPOModule, pl_module).policy)
        found = policy.generate(
            self._ids, attention_mask=torch.ones_like(self._ids), max_new_tokens=self.max_tokens, do_sample=False
        )
        texts = self._tokenizer.batch_decode(found[:, self._ids.shape[1] :], skip_special_tokens=True)
        right = sum(text.strip() == answer for text, answer in zip(texts, self._answers, strict=True))
        for logger in trainer.loggers:
            logger.log_metrics({EXACT_MATCH: right / len(texts)}, trainer.global_step)
