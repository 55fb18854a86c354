"""The carriers that travel from room to room: frozen, keyword-only, documented field by field.

Units: log-probabilities are in nats. Letters in shapes: B rows, S tokens of a row (padded), T those of them that the
policy sampled (padded), in order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt source, ready for the engine."""

    row: int
    """Index of the row in its source, from 0. It names the row in messages."""
    prompt: str | Messages
    """The prompt as the data has it, text or chat messages. Rewards receive it in this form."""
    token_ids: tuple[int, ...]
    """The prompt as the engine and the trainer see it: chat template applied, special tokens included."""
    columns: Mapping[str, Any]
    """Every other column of the row, handed to the rewards by name."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn. Names and defaults are vLLM's SamplingParams'."""

    temperature: float = 1.0
    """Logits are divided by it. 0 is greedy decoding (validation only)."""
    max_tokens: int = 256
    """Most tokens of a completion, the end-of-sequence token included."""
    top_p: float = 1.0
    """Nucleus mass kept. Below 1 only in validation: see `check_trainable`."""
    top_k: int = 0
    """Tokens kept by rank; 0 keeps all. Other values only in validation."""
    min_p: float = 0.0
    """Least probability kept, relative to the likeliest token. Above 0 only in validation."""
    repetition_penalty: float = 1.0
    """Other than 1 only in validation."""
    presence_penalty: float = 0.0
    """Other than 0 only in validation."""
    frequency_penalty: float = 0.0
    """Other than 0 only in validation."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens={self.max_tokens}: a completion needs at least 1 token")
        if not self.temperature >= 0:
            raise ValueError(f"sampling.temperature={self.temperature}: must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p}: must be above 0 and at most 1")

    def check_trainable(self) -> None:
        """Refuse sampling whose log-probabilities the trainer cannot reproduce.

        Raises:
            ValueError: naming the setting. Top-p, top-k, min-p and penalties renormalise or shift the sampled
                distribution: the engine's log-probability is then relative to a sampling support that the trainer does
                not know, and the ratio old / rollout would carry the mass of that support.
        """
        neutral = SamplingConfig()
        names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in names:
            value = getattr(self, name)
            if value != getattr(neutral, name) and not (name == "top_k" and value == -1):
                raise ValueError(
                    f"sampling.{name}={value}: the engine's log-probabilities would be those of a filtered or shifted "
                    f"distribution, which the trainer cannot reproduce; train with {name}={getattr(neutral, name)} "
                    f"(other values are for data.val_sampling)."
                )
        if self.temperature <= 0:
            raise ValueError(
                f"sampling.temperature={self.temperature}: training samples need a temperature above 0 "
                f"(greedy decoding gives a group of equal completions and no gradient)."
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion asked of an engine."""

    token_ids: tuple[int, ...]
    """The prompt's ids; never empty."""
    seed: int
    """Seed of this request's draws; equal seed, prompt, weights and batch give an equal completion."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine sampled for one request."""

    token_ids: tuple[int, ...]
    """The sampled ids in order; the end-of-sequence id, when sampled, is the last one."""
    logprobs: tuple[float, ...] | None
    """Log-probability of each id under the distribution it was drawn from. None: the engine gave none.
    A single NaN: that token's value is missing."""
    finish_reason: FinishReason
    """"stop": an end-of-sequence id was sampled. "length": cut at `max_tokens` or at the context's end."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What an engine made of a completion that it was made to decode token by token instead of sampling."""

    prompt_ids: tuple[int, ...]
    """The prompt as the engine consumed it."""
    logprobs: tuple[float, ...]
    """Log-probability of each forced id under the distribution that it would have been drawn from."""
    top_ids: tuple[tuple[int, ...], ...]
    """The likeliest ids of each position, likeliest first."""
    top_logprobs: tuple[tuple[float, ...], ...]
    """The log-probabilities of `top_ids`, nats."""
    router_logits: Mapping[str, Tensor]
    """[prompt + completion - 1, experts] float32 of each mixture-of-experts layer, by the Hugging Face name of its
    router module, for the tokens in order; empty for a dense model, or where they were not asked for."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A completion with its rewards: what a person would look at."""

    prompt: Prompt
    """The prompt that the engine completed."""
    completion: Completion
    """What the engine sampled."""
    text: str
    """The completion decoded without special tokens."""
    rewards: Mapping[str, float | None]
    """Value of each reward function by name; None where a function did not apply to the row."""
    reward: float
    """The weighted sum of the rewards."""


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One row as the trainer needs it: plain numbers, so that a checkpoint can carry it.

    A row is a sequence of tokens, some of which the policy sampled. The others (the prompt, what a tool or an
    environment answered) are foreign: they are read, never trained on, and have no log-probability here, because every
    field "per sampled token" has one entry for each sampled token in order and none for any other.

    Raises:
        ValueError: if the fields do not fit together; the message names the field.
    """

    token_ids: tuple[int, ...]
    """The whole sequence of token ids, exactly as the engine consumed and produced them."""
    sampled: tuple[bool, ...]
    """For each token id: whether the policy sampled it. The first never is: nothing stands before it."""
    policy_versions: tuple[int, ...]
    """Per sampled token: `global_step` of the weights that sampled it; -1 where that is unknown."""
    rollout_logprobs: tuple[float, ...] | None
    """Per sampled token: the engine's log-probability; NaN where one is missing. None: the engine gave none."""
    old_logprobs: tuple[float, ...] | None = None
    """Per sampled token: the trainer's log-probability at sampling time. None: the row was not scored."""
    ref_logprobs: tuple[float, ...] | None = None
    """Per sampled token: the frozen reference's log-probability. None: there is no KL penalty."""
    loss_mask: tuple[bool, ...] | None = None
    """Per sampled token: whether the loss may use it. None: it may use all of them."""
    advantage: float
    """Advantage of the row in its group, shared by all of its sampled tokens."""
    reward: float
    """The weighted sum of the rewards. NaN: no reward function applied to the row, and its advantage is 0."""

    def __post_init__(self) -> None:
        if len(self.sampled) != len(self.token_ids):
            raise ValueError(f"sampled has {len(self.sampled)} values for {len(self.token_ids)} token ids")
        count = self.sampled_count
        if not count or self.sampled[0]:
            raise ValueError("a row needs a prompt and a completion: its first token is given, some later one sampled")
        for name in ("policy_versions", "rollout_logprobs", "old_logprobs", "ref_logprobs", "loss_mask"):
            value = getattr(self, name)
            if value is not None and len(value) != count:
                raise ValueError(f"{name} has {len(value)} values for {count} sampled tokens")

    @classmethod
    def of_completion(
        cls, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, policy_version: int = -1, **fields: Any
    ) -> TrainRow:
        """Return the row of one prompt and one completion, all of it sampled by one policy version.

        Args:
            prompt_ids: the prompt's ids; at least one.
            completion_ids: the sampled ids; at least one.
            policy_version: `global_step` of the weights that sampled them.
            fields: the fields beside these.
        """
        return cls(
            token_ids=(*prompt_ids, *completion_ids),
            sampled=(False,) * len(prompt_ids) + (True,) * len(completion_ids),
            policy_versions=(policy_version,) * len(completion_ids),
            **fields,
        )

    @property
    def sampled_count(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self.sampled)

    @property
    def positions(self) -> tuple[int, ...]:
        """Per sampled token: its index in `token_ids`."""
        return tuple(index for index, sampled in enumerate(self.sampled) if sampled)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Per sampled token: its id."""
        return tuple(itertools.compress(self.token_ids, self.sampled))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the first sampled one."""
        return self.token_ids[: self.sampled.index(True)]

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """The tokens from the first sampled one on, foreign ones between them included."""
        return self.token_ids[self.sampled.index(True) :]


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over rows that a correction needs from all micro-batches and ranks of an optimiser step."""

    weight_sum: float
    """Importance weights added up, before any normalisation (see `app.maths.correction.weight_sums`)."""
    weight_count: float
    """How many of them: tokens, or rows at row levels."""
    kept_tokens: int
    """Tokens left after rejection, veto and the filters of the rollout."""
    kept_rows: int
    """Rows with such a token."""

    def __add__(self, other: StepSums) -> StepSums:
        """The sums of both."""
        return StepSums(
            weight_sum=self.weight_sum + other.weight_sum,
            weight_count=self.weight_count + other.weight_count,
            kept_tokens=self.kept_tokens + other.kept_tokens,
            kept_rows=self.kept_rows + other.kept_rows,
        )


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What one optimiser step holds over all ranks and micro-batches: the loss is normalised by it."""

    tokens: int
    """Sampled tokens, before anything is rejected."""
    rows: int
    """Rows with at least one of them."""
    micro_batches: int
    """Micro-batches of all ranks."""
    sums: StepSums | None = None
    """None: the settings need no such sums."""

    def __add__(self, other: StepTotals) -> StepTotals:
        """The totals of two ranks."""
        return StepTotals(
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            micro_batches=self.micro_batches + other.micro_batches,
            sums=None if self.sums is None or other.sums is None else self.sums + other.sums,
        )


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Rows of one micro-batch, on one rank. Sequences are right-padded, so causal attention needs no mask.

    [B, T] tensors have one column per sampled token of a row, in order; foreign tokens stand in `input_ids` alone.
    """

    input_ids: Tensor
    """[B, S] int64: every token of each row, then padding."""
    positions: Tensor
    """[B, T] int64: the column of `input_ids` in which each sampled token stands, 1 or more; 1 where masked."""
    mask: Tensor
    """[B, T] bool: which of the T places hold a sampled token."""
    loss_mask: Tensor
    """[B, T] bool: sampled tokens that the loss may use; `mask` without rows and tokens filtered out at sampling."""
    rollout_logprobs: Tensor
    """[B, T] float32, the engine's log-probabilities: 0 where masked, NaN where missing."""
    policy_versions: Tensor
    """[B, T] int64: `global_step` of the weights that sampled each token; 0 where masked."""
    correctable: bool
    """False: some row of the rollout, on some rank, came without log-probabilities, and no rank corrects."""
    old_logprobs: Tensor | None
    """[B, T] float32, the trainer's at sampling time. None: not scored; the step takes `new.detach()`."""
    ref_logprobs: Tensor | None
    """[B, T] float32 of the frozen reference. None: there is no KL penalty."""
    advantages: Tensor
    """[B] float32: the advantage of each row in its group."""
    rewards: Tensor
    """[B] float32: the weighted sum of the reward functions; NaN where none applied."""
    lengths: tuple[int, ...]
    """Tokens of each row, on the host: rows are cut into forward passes without a device sync."""
    sampled_tokens: tuple[int, ...]
    """Sampled tokens of each row, on the host: indices are built from it without a device sync."""
    totals: StepTotals
    """What the whole optimiser step holds; the loss is normalised by it."""
    ends_rollout: bool
    """True on the last micro-batch of a rollout: the weights are synced after it."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TrainBatch:
        """Return the batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)
