"""Under which conditions the same tokens are scored again: what differs from the pipeline as it is configured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from app.policy.loading import Attention, Dtype


@dataclass(frozen=True, kw_only=True)
class EngineCondition:
    """How the engine decodes the audited tokens once more. The default is: as it sampled them."""

    args: tuple[tuple[str, object], ...] = ()
    """Arguments of the engine to replace, by name, e.g. (("kv_cache_dtype", "auto"),). They need a new engine, which is
    given the trainer's weights; () keeps the engine that sampled."""
    weights: Literal["held", "sent", "files"] = "held"
    """held: the weights that the engine has. sent: the trainer's weights are sent once more before it decodes. files: a
    new engine is started from the trainer's weights, as every one with other `args` is."""
    neutral_sampling: bool = False
    """Decode without top-p, top-k, min-p and penalties, at the configured temperature."""
    read_prefix_cache: bool = True
    """False: no cached block is used."""
    batch_size: int | None = None
    """Requests decoded together; None: all, as the engine is configured."""


@dataclass(frozen=True, kw_only=True)
class SamplingSupport:
    """The tokens that a sampler can draw, over which it renormalises their probabilities."""

    top_k: int = 0
    """Number of likeliest tokens in the support; 0: all."""
    top_p: float = 1.0
    """Probability mass of the nucleus; 1: all tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainerCondition:
    """How the trainer scores the audited tokens. The default is: as in training."""

    dtype: Dtype | None = None
    """Of the parameters; None: as configured, mixed precision included."""
    attention: Attention | None = None
    """Attention kernel; None: as configured."""
    arrangement: Literal["micro_batches", "single_rows", "left_padded"] = "micro_batches"
    """micro_batches: the function that training uses, right-padded. single_rows: every row alone, without padding.
    left_padded: padded on the left, with attention mask and position ids."""
    micro_batch_tokens: int | None = None
    """Budget of one forward pass, in padded tokens, under `micro_batches`; None: as configured."""
    temperature: float | None = None
    """Divides the logits; None: as configured."""
    support: SamplingSupport | None = None
    """Renormalise over this sampling support; None: over the whole vocabulary, as in training."""
    adapters: float = 1.0
    """Factor on the LoRA adapters: 0 switches them off, 2 is a base into which they were merged once too often."""
    engine_routing: bool = False
    """Take the router logits that the engine had, in every mixture-of-experts layer."""
    consumed_prompts: bool = False
    """Score after the prompt ids that the engine really consumed, not those that it was sent."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A pair of conditions under which the mismatch is measured."""

    engine: EngineCondition | None = None
    """None: the log-probabilities that came with the samples."""
    trainer: TrainerCondition = field(default_factory=TrainerCondition)
    """Of the trainer."""
