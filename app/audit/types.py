"""What the audit passes from measurement to comparison to report. Log-probabilities are in nats, N tokens in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Side = Literal["engine", "trainer", "both"]
Verdict = Literal["match", "within noise", "mismatch"]


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One sampled row, whose tokens are scored again and again."""

    prompt_ids: tuple[int, ...]
    """The prompt as it was sent to the engine."""
    completion_ids: tuple[int, ...]
    """The sampled ids; never empty."""
    finish_reason: Literal["stop", "length"]
    """As the engine gave it."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """One side's view of every completion token of all rows, in the order of the rows. On the CPU."""

    logprobs: Tensor
    """[N] float64: of the audited token. NaN: missing."""
    top_ids: Tensor | None = None
    """[N, K] int64: the K likeliest tokens, likeliest first. None: not asked for."""
    top_logprobs: Tensor | None = None
    """[N, K] float64: theirs."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two views of the same tokens are apart; l = trainer - engine, clamped to [-20, 20] in k3."""

    mean_abs: float
    """Mean |l|, nats, unclamped."""
    max_abs: float
    """Largest |l|."""
    rms: float
    """Root of the mean squared l, nats."""
    k3: float
    """Mean of exp(l) - 1 - l, each at most 10."""
    tokens: int
    """Compared: finite on both sides."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of ids, text or weights that is right or wrong, not more or less."""

    name: str
    """What was compared, e.g. "prompt ids"."""
    passed: bool | None
    """None: could not be checked; `detail` says why."""
    detail: str
    """One line: what was found."""


@dataclass(frozen=True, kw_only=True)
class NoiseSource:
    """One side against itself: by how much a change that should not matter moves the log-probabilities."""

    side: Side
    """Whose."""
    name: str
    """What was changed, e.g. "half the batch"."""
    distance: Distance
    """Between the two scorings."""
    in_floor: bool
    """Whether it counts for the noise floor. A change of precision is shown, but it is a choice, not noise."""


@dataclass(frozen=True, kw_only=True)
class FactorResult:
    """What was left of the mismatch when one factor was taken away."""

    key: str
    """Name in audit.json, e.g. "kv_cache_dtype"."""
    title: str
    """Name for people, e.g. "key-value cache dtype"."""
    side: Side
    """Whose setting it is."""
    change: str
    """What was changed, e.g. "fp8 -> auto"."""
    left: Distance
    """Between engine and trainer with it."""
    share: float
    """Of the mean squared difference beyond the noise floor, how much the change removed: 1 is all, below 0 worse."""
    remedy: str
    """A fragment of YAML to lay over the configuration, or where there is no such setting a comment that says what to
    do."""
    evidence: str = ""
    """One line of direct proof, if there is any, e.g. the names of weights that differ. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Every factor toggled on top of those already taken away."""

    taken_away: tuple[str, ...]
    """Keys of the factors removed before this round."""
    start: Distance
    """With those removed."""
    factors: tuple[FactorResult, ...]
    """Ranked: the likeliest cause first."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Tokens of one range."""

    label: str
    """The range, e.g. "4-7" or "0.01-0.1"."""
    tokens: int
    """How many; at least 1."""
    mean_abs: float
    """Mean |l| of them, nats."""
    k3: float
    """Mean k3 of them."""


@dataclass(frozen=True, kw_only=True)
class WorstToken:
    """A token on which the two sides differ most, in its context."""

    row: int
    """Index of the row."""
    position: int
    """Index in the completion."""
    token_id: int
    """The token."""
    token: str
    """Its text."""
    before: str
    """Text before it, shortened from the left."""
    after: str
    """Text after it, shortened from the right."""
    engine: float
    """The engine's log-probability."""
    trainer: float
    """The trainer's."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Engine and trainer on the same tokens, in full."""

    distance: Distance
    """Overall."""
    metrics: Mapping[str, float]
    """The diagnostics of training, by their key with the prefix `rollout_correction/`."""
    top1_agreement: float | None
    """Share of tokens where both sides have the same likeliest token. None: the engine gives no others."""
    topk_overlap: float | None
    """Mean share of the K likeliest tokens that both sides have."""
    topk_drift: float | None
    """Mean |trainer - engine| over tokens in both sides' K likeliest, nats."""
    by_position: tuple[Bin, ...]
    """By position in the completion."""
    by_probability: tuple[Bin, ...]
    """By rarity: the geometric mean of both sides' probability."""
    worst: tuple[WorstToken, ...]
    """Worst first."""
    scatter: tuple[tuple[float, float], ...]
    """(engine, trainer) log-probabilities of a sample of tokens, for a picture; the worst are among them."""
    histogram: tuple[tuple[float, float, int], ...]
    """(from, to, tokens) of l, nats."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One bound of --fail-above."""

    key: str
    """A metric, without its prefix."""
    bound: float
    """Largest value that passes."""
    value: float | None
    """What was measured. None: nothing was, which fails."""

    @property
    def passed(self) -> bool:
        """Whether the value is within the bound."""
        return self.value is not None and self.value <= self.bound


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Everything an audit found."""

    verdict: Verdict
    """match: the difference is that of float32 rounding. within noise: no more than each side differs from itself.
    mismatch: more than that."""
    summary: str
    """One or two sentences for a person in a hurry."""
    mode: Literal["quick", "thorough"]
    """How much was tried."""
    settings: Mapping[str, str]
    """What was audited: model, checkpoint, engine, trainer, sampling, prompts, versions."""
    checks: tuple[Check, ...]
    """Of ids, template, end of sequence, weights."""
    comparison: Comparison
    """As configured."""
    noise: tuple[NoiseSource, ...]
    """Each side against itself."""
    floor: Distance
    """The largest of the noise that counts."""
    rounds: tuple[Round, ...]
    """Attribution; empty without a mismatch."""
    gates: tuple[Gate, ...]
    """Of --fail-above."""
    seconds: Mapping[str, float]
    """Wall time by stage."""
    notes: tuple[str, ...]
    """What could not be done, and why."""
