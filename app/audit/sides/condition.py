"""Conditions under which the same tokens are scored again: what differs from the configured pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from app.policy.loading import Attention, Dtype


@dataclass(frozen=True, kw_only=True)
class EngineCondition:
    """How the engine decodes the audited tokens once more; by default as it sampled them."""

    args: tuple[tuple[str, object], ...] = ()
    """Engine arguments to replace, by name, e.g. (("kv_cache_dtype", "auto"),). They need a new engine, which starts
    with the trainer's weights; (): the engine that sampled."""
    weights: Literal["held", "sent", "files"] = "held"
    """held: the weights that the engine holds. sent: the trainer's weights are sent once more before decoding. files: a
    new engine is started from the trainer's weights, as it always is with other `args`."""
    neutral_sampling: bool = False
    """Whether to decode without top-p, top-k, min-p and penalties, at the configured temperature."""
    read_prefix_cache: bool = True
    """Whether cached blocks of the prompt are used."""
    batch_size: int | None = None
    """Requests decoded together; None: as many as the engine takes."""


@dataclass(frozen=True, kw_only=True)
class SamplingSupport:
    """The tokens that a sampler can draw, over which it renormalises their probabilities."""

    top_k: int = 0
    """Number of likeliest tokens in the support; 0: all."""
    top_p: float = 1.0
    """Probability mass of the nucleus; 1: all tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainerCondition:
    """How the trainer scores the audited tokens; by default as in training."""

    dtype: Dtype | None = None
    """Dtype of the parameters; None: as configured, mixed precision included."""
    attention: Attention | None = None
    """Attention kernel of the policy; None: as configured."""
    arrangement: Literal["micro_batches", "single_rows", "left_padded"] = "micro_batches"
    """micro_batches: right-padded, by the scoring function of training. single_rows: every row alone, without padding.
    left_padded: padded on the left, with attention mask and position ids."""
    micro_batch_tokens: int | None = None
    """Budget for one forward pass under `micro_batches`, in padded tokens; None: as configured."""
    temperature: float | None = None
    """Temperature that divides the logits; None: as configured."""
    support: SamplingSupport | None = None
    """Renormalise over this sampling support; None: over the whole vocabulary, as in training."""
    adapters: float = 1.0
    """Factor on the LoRA adapters: 0 switches them off, 2 imitates a base into which they were merged before."""
    engine_routing: bool = False
    """Whether every mixture-of-experts layer uses the router logits that the engine recorded."""
    consumed_prompts: bool = False
    """Whether to score after the prompt ids that the engine consumed instead of those it was sent."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A pair of conditions under which the mismatch is measured."""

    engine: EngineCondition | None = None
    """How the engine decodes; None: uses the log-probabilities that came with the samples."""
    trainer: TrainerCondition = field(default_factory=TrainerCondition)
    """How the trainer scores the audited tokens."""
