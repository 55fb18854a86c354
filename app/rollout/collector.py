"""Prompts to samples: sample with the engine, decode, reward."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from app.engine.recovery import EngineRecovery
from app.errors import LockstepError
from app.rewards.weighted_sum import RewardSum
from app.types import Completion, Prompt, Request, Sample, SamplingConfig


class PolicyVersionError(LockstepError, RuntimeError):
    """The engine holds other weights than the rollout needs."""


class Collector:
    """Samples completions of prompts and rewards them. Holds no state of its own between calls."""

    def __init__(
        self, recovery: EngineRecovery, rewards: RewardSum, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        """Sample with the engine of `recovery`."""
        self.recovery = recovery
        self.engine = recovery.engine
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.seed = seed

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        num_generations: int,
        policy_version: int,
        draws: Sequence[int],
    ) -> list[Sample]:
        """Sample `num_generations` completions of each prompt; rows of one prompt stand together.

        All ranks must call it together: if the engine of one fails, all of them bring it up again.

        Args:
            prompts: what to complete; a rank may have none.
            sampling: how to draw.
            num_generations: completions per prompt.
            policy_version: `global_step` whose weights must be in the engine.
            draws: one number for each prompt, never used twice in a run. With the seed and the member of the group
                it decides the random numbers, whatever was drawn before and on whatever rank.

        Raises:
            PolicyVersionError: if the engine holds other weights.
            EngineError: if an engine failed and could not be brought up again.
            LockstepError: if a reward function failed on another rank.
        """
        if self.engine.policy_version != policy_version:
            raise PolicyVersionError(
                f"the rollout needs the weights of step {policy_version} but the engine holds those of step "
                f"{self.engine.policy_version}: the WeightSync callback must run before each rollout"
            )
        row_prompts = [prompt for prompt in prompts for _ in range(num_generations)]
        requests = [
            Request(token_ids=prompt.token_ids, seed=row_seed(self.seed, draw, member))
            for prompt, draw in zip(prompts, draws, strict=True)
            for member in range(num_generations)
        ]
        completions = self.recovery.run(lambda: self.engine.generate(requests, sampling) if requests else [])
        return self.recovery.world.together(lambda: self._samples(row_prompts, completions), LockstepError)

    def _samples(self, row_prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Sample]:
        """Decode and reward completions."""
        if not completions:
            return []
        texts = self.tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        table = self.rewards.score(row_prompts, texts, [list(c.token_ids) for c in completions])
        return [
            Sample(
                prompt=prompt,
                completion=completion,
                text=text,
                rewards={name: values[i] for name, values in table.values.items()},
                reward=table.total[i],
            )
            for i, (prompt, completion, text) in enumerate(zip(row_prompts, completions, texts, strict=True))
        ]


def row_seed(*parts: int) -> int:
    """Return a 56-bit seed that depends on every part and on their order."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
