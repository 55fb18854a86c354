"""Carriers between measurement, comparison and report. Log-probabilities are in nats; N is the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Side = Literal["engine", "trainer", "both"]
Verdict = Literal["match", "within noise", "mismatch"]


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One sampled row, whose tokens are scored under several conditions."""

    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, as it was sent to the engine."""
    completion_ids: tuple[int, ...]
    """Token ids that the engine sampled; never empty."""
    finish_reason: Literal["stop", "length"]
    """Why the completion ended, as the engine reported it."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """One side's scores of every completion token, in the order of the rows, on the CPU."""

    logprobs: Tensor
    """[N] float64: log-probability of the audited token; NaN: missing."""
    top_ids: Tensor | None = None
    """[N, K] int64: the K likeliest tokens, likeliest first. None: not requested."""
    top_logprobs: Tensor | None = None
    """[N, K] float64: log-probabilities of `top_ids`. None: not requested."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two scorings of the same tokens differ; l = trainer - engine, clamped to [-20, 20] in k3."""

    mean_abs: float
    """Mean of |l|, nats, unclamped."""
    max_abs: float
    """Largest |l|, nats, unclamped."""
    rms: float
    """Root mean square of l, nats, unclamped."""
    k3: float
    """Mean of exp(l) - 1 - l, each term capped at 10."""
    tokens: int
    """Number of tokens compared: those finite on both sides."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of ids, text or weights, which either passes or fails."""

    name: str
    """What was compared, e.g. "prompt ids"."""
    passed: bool | None
    """Whether the check passed. None: it could not be made, see `detail`."""
    detail: str
    """What was found, or why nothing could be checked; one line."""


@dataclass(frozen=True, kw_only=True)
class NoiseSource:
    """One side against itself: how much a change that should not matter moves its log-probabilities."""

    side: Side
    """The side that is compared with itself."""
    name: str
    """What was changed, e.g. "half the batch"."""
    distance: Distance
    """Distance between the scorings with and without the change."""
    in_floor: bool
    """Whether it counts for the noise floor. A change of precision is reported, but is a choice and not noise."""


@dataclass(frozen=True, kw_only=True)
class FactorResult:
    """The mismatch that remains when one factor is removed."""

    key: str
    """Name of the factor in audit.json, e.g. "kv_cache_dtype"."""
    title: str
    """Name of the factor for people, e.g. "key-value cache dtype"."""
    side: Side
    """The side that has this setting."""
    change: str
    """What was changed, e.g. "fp8 -> auto"."""
    left: Distance
    """Distance between engine and trainer after the change."""
    share: float
    """Share of the mean squared difference beyond the noise floor that the change removed; below 0: made it worse."""
    remedy: str
    """YAML to lay over the configuration; where no setting fixes the factor, a YAML comment that says what to do."""
    evidence: str = ""
    """Direct proof in one line, e.g. the names of weights that differ. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of the attribution: every remaining factor toggled alone."""

    taken_away: tuple[str, ...]
    """Keys of the factors that earlier rounds removed."""
    start: Distance
    """Distance between engine and trainer with those factors removed."""
    factors: tuple[FactorResult, ...]
    """Factors tried in this round, the likeliest cause first."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The tokens in one range of positions or probabilities."""

    label: str
    """The range in words, e.g. "4-7" or "0.01-0.1"."""
    tokens: int
    """Number of tokens in the range; at least 1."""
    mean_abs: float
    """Mean |trainer - engine| of these tokens, nats."""
    k3: float
    """Mean k3 of these tokens, nats."""


@dataclass(frozen=True, kw_only=True)
class WorstToken:
    """One of the tokens on which the two sides differ most, in context."""

    row: int
    """Index of the row, from 0."""
    position: int
    """Index of the token in its completion, from 0."""
    token_id: int
    """Id of the token in the vocabulary."""
    token: str
    """Text of the token, escaped to one line."""
    before: str
    """Text before the token, shortened from the left."""
    after: str
    """Text after the token, shortened from the right."""
    engine: float
    """Log-probability of the token in the engine, nats."""
    trainer: float
    """Log-probability of the token in the trainer, nats."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Engine and trainer compared on the same tokens."""

    distance: Distance
    """Distance over all tokens, as configured."""
    metrics: Mapping[str, float]
    """Diagnostics of training by key, with the prefix `rollout_correction/`."""
    top1_agreement: float | None
    """Share of tokens where both sides have the same likeliest token. None: a side reports only the audited ids."""
    topk_overlap: float | None
    """Mean share of the K likeliest tokens that both sides have in common. None: as above."""
    topk_drift: float | None
    """Mean |trainer - engine| over tokens in both sides' K likeliest, nats. None: no such token."""
    by_position: tuple[Bin, ...]
    """Bins by position in the completion, from the start."""
    by_probability: tuple[Bin, ...]
    """Bins by the geometric mean of both sides' probability, likeliest first."""
    worst: tuple[WorstToken, ...]
    """Tokens with the largest |l|, worst first."""
    scatter: tuple[tuple[float, float], ...]
    """(engine, trainer) log-probabilities of a sample of tokens that includes the worst, for a scatter plot."""
    histogram: tuple[tuple[float, float, int], ...]
    """Histogram of l as (from, to, tokens), nats."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One bound set by --fail-above, and the measured value."""

    key: str
    """Key of the metric, without its prefix."""
    bound: float
    """Largest value that passes."""
    value: float | None
    """Measured value of the metric. None: not measured, which fails."""

    @property
    def passed(self) -> bool:
        """Whether the value is within the bound."""
        return self.value is not None and self.value <= self.bound


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Everything an audit found."""

    verdict: Verdict
    """match: the difference is float32 rounding. within noise: no more than each side differs from itself.
    mismatch: more than that."""
    summary: str
    """The findings in one or two sentences."""
    mode: Literal["quick", "thorough"]
    """How thorough the audit was, see `EFFORTS`."""
    settings: Mapping[str, str]
    """What was audited: model, checkpoint, engine, trainer, sampling, prompts, versions."""
    checks: tuple[Check, ...]
    """Checks of ids, chat template, end of sequence and weights."""
    comparison: Comparison
    """Engine and trainer compared as they are configured."""
    noise: tuple[NoiseSource, ...]
    """Noise of each side: its distances to itself."""
    floor: Distance
    """The noise floor: the largest noise that counts, field by field."""
    rounds: tuple[Round, ...]
    """Rounds of the attribution; empty without a mismatch."""
    gates: tuple[Gate, ...]
    """Bounds set by --fail-above; empty without any."""
    seconds: Mapping[str, float]
    """Wall time of each stage, seconds."""
    notes: tuple[str, ...]
    """What could not be measured, and why; one line each."""
