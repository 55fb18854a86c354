"""Audits as reports could meet them: a mismatch with clear causes, a healthy pipeline, one with next to no data."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from app.audit.types import (
    Audit,
    Bin,
    Check,
    Comparison,
    Distance,
    FactorResult,
    Gate,
    NoiseSource,
    Round,
    Side,
    WorstToken,
)

HOSTILE = "</td><script>alert('x')</script>&amp;\x1b[2J\u202e\ud800\n\"" + "very long " * 30
"""A token text that would break a page or a terminal that shows it as it is."""


def distance(mean_abs: float, tokens: int = 2048) -> Distance:
    """A distance of normally distributed differences: rms = mean |l| * sqrt(pi / 2), k3 about rms^2 / 2."""
    rms = mean_abs * math.sqrt(math.pi / 2)
    return Distance(mean_abs=mean_abs, max_abs=4.5 * rms, rms=rms, k3=min(10.0, rms**2 / 2), tokens=tokens)


def factor(
    key: str, title: str, side: Side, change: str, left: float, share: float, remedy: str, evidence: str = ""
) -> FactorResult:
    """A factor after which `left` nats remain."""
    return FactorResult(
        key=key,
        title=title,
        side=side,
        change=change,
        left=distance(left),
        share=share,
        remedy=remedy,
        evidence=evidence,
    )


CACHE = factor(
    "kv_cache_dtype",
    "key-value cache dtype",
    "engine",
    "fp8 -> auto",
    0.021,
    0.985,
    "data:\n  engine:\n    init_args: {kv_cache_dtype: auto}",
)
TEMPERATURE = factor(
    "temperature",
    "temperature and log-probability semantics",
    "both",
    "trainer scores at temperature 0.95, not 1",
    4.1e-5,
    0.9998,
    "# the engine's log-probabilities are of another temperature than data.sampling.temperature:\n"
    "# it must report processed ones (logprobs_mode: processed_logprobs), or was started with another one",
    "the trainer comes closest to the engine at temperature 0.95",
)
CACHING = factor(
    "prefix_cache",
    "prefix cache",
    "engine",
    "no cached block is read",
    0.1715,
    0.004,
    "data:\n  engine:\n    init_args: {engine_args: {enable_prefix_caching: false}}"
    "  # or reset the cache after every weight sync (reset_prefix_cache)",
)
WEIGHTS = factor(
    "weights",
    "stale or partly synced weights",
    "engine",
    "the trainer's weights sent once more",
    0.172,
    0.0,
    "# weight_sync: {verify: checksum}  stops the run at the first weight that did not arrive",
)
ATTENTION = factor(
    "attention",
    "attention kernel",
    "trainer",
    "sdpa -> eager",
    0.1722,
    -0.0023,
    "model: {attn_implementation: eager}",
)
SUPPORT = factor(
    "sampling_processors",
    "sampling processors (top-p, top-k, min-p, penalties)",
    "engine",
    "trainer renormalised over top_k 20, which holds every sampled token",
    0.31,
    -2.25,
    "# the engine filters although data.sampling does not ask for it: look for sampling defaults in\n"
    "# the model's generation_config.json or in the engine's arguments",
)


def mismatch_audit() -> Audit:
    """An fp8 cache, and beneath it a wrong temperature; a failed check and a failed gate."""
    return Audit(
        verdict="mismatch",
        summary="The key-value cache of the engine is kept in fp8: that explains 98 % of the mismatch. What is left "
        "comes from another temperature.",
        mode="quick",
        settings=SETTINGS,
        checks=(
            Check(name="prompt ids", passed=True, detail="all 32 prompts consumed as sent"),
            Check(name="special tokens", passed=True, detail="no second beginning-of-sequence token"),
            Check(
                name="end of sequence",
                passed=False,
                detail="3 of 32 rows stop at id 151643, which the trainer's generation config does not list",
            ),
            Check(
                name="engine weights",
                passed=None,
                detail="the engine keeps quantised weights, which cannot be compared one by one",
            ),
        ),
        comparison=comparison(scale=0.172, outside=True),
        noise=NOISE,
        floor=NOISE[1].distance,
        rounds=(
            Round(taken_away=(), start=distance(0.172), factors=(CACHE, CACHING, WEIGHTS, ATTENTION, SUPPORT)),
            Round(
                taken_away=("kv_cache_dtype",),
                start=distance(0.021),
                factors=(
                    TEMPERATURE,
                    factor(
                        "attention",
                        "attention kernel",
                        "trainer",
                        "sdpa -> eager",
                        0.021,
                        0.001,
                        "model: {attn_implementation: eager}",
                    ),
                ),
            ),
        ),
        gates=(
            Gate(key="k3_kl", bound=1e-3, value=0.0232),
            Gate(key="chi2_token", bound=1.0, value=0.071),
            Gate(key="policy_lag", bound=0.0, value=None),
        ),
        seconds={"sample": 21.4, "score": 33.25, "noise": 40.0, "attribution": 61.75},
        notes=("the engine has no FlashInfer kernel on this machine: the attention backend was not toggled",),
    )


def healthy_audit() -> Audit:
    """Within noise: nothing to attribute."""
    return Audit(
        verdict="within noise",
        summary="Engine and trainer differ by no more than each differs from itself.",
        mode="thorough",
        settings=SETTINGS,
        checks=(
            Check(name="prompt ids", passed=True, detail="all 32 prompts consumed as sent"),
            Check(name="end of sequence", passed=True, detail="all 32 rows end where the trainer expects it"),
        ),
        comparison=comparison(scale=3.2e-5, outside=False),
        noise=NOISE,
        floor=NOISE[1].distance,
        rounds=(),
        gates=(Gate(key="k3_kl", bound=1e-3, value=8e-10),),
        seconds={"sample": 20.0, "score": 30.0, "noise": 41.0},
        notes=(),
    )


def bare_audit() -> Audit:
    """One token whose text is hostile, nothing comparable, nothing measured twice: every optional value is absent."""
    nothing = Distance(mean_abs=math.nan, max_abs=math.nan, rms=math.nan, k3=math.nan, tokens=0)
    worst = WorstToken(
        row=0, position=0, token_id=7, token=HOSTILE, before=HOSTILE, after="", engine=-math.inf, trainer=math.nan
    )
    blank = FactorResult(
        key="<i>",
        title="<i>factor</i>",
        side="both",
        change=HOSTILE,
        left=nothing,
        share=math.nan,
        remedy="# <b>nothing</b>",
        evidence=HOSTILE,
    )
    return Audit(
        verdict="mismatch",
        summary=HOSTILE,
        mode="quick",
        settings={"model": HOSTILE},
        checks=(Check(name="<check>", passed=False, detail=HOSTILE),),
        comparison=Comparison(
            distance=nothing,
            metrics={"rollout_correction/k3_kl": math.nan, "<odd>": math.inf},
            top1_agreement=None,
            topk_overlap=None,
            topk_drift=None,
            by_position=(Bin(label="0", tokens=1, mean_abs=math.nan, k3=math.nan),),
            by_probability=(),
            worst=(worst,),
            scatter=((-math.inf, math.nan),),
            histogram=(),
        ),
        noise=(NoiseSource(side="engine", name="<noise>", distance=nothing, in_floor=True),),
        floor=nothing,
        rounds=(
            Round(taken_away=(), start=nothing, factors=()),
            Round(taken_away=("<i>",), start=nothing, factors=(blank,)),
        ),
        gates=(Gate(key="<gate>", bound=0.0, value=None),),
        seconds={},
        notes=(HOSTILE,),
    )


def comparison(scale: float, outside: bool) -> Comparison:
    """A comparison of 2048 tokens whose differences are normal with mean |l| = scale, a few far worse."""
    chance = random.Random(0)
    sigma = scale * math.sqrt(math.pi / 2)
    engine = [-chance.expovariate(1.2) for _ in range(2048)]
    l_values = [chance.gauss(0, sigma) * min(1.0, 0.1 - value) for value in engine]
    for i, factor_ in ((100, 14.0), (700, -22.0), (1300, -9.0), (1800, 11.0), (2000, -30.0)):
        l_values[i] = sigma * factor_
    trainer = [min(0.0, value + change) for value, change in zip(engine, l_values, strict=True)]
    pairs = list(zip(engine, trainer, strict=True))
    order = sorted(range(2048), key=lambda i: -abs(pairs[i][1] - pairs[i][0]))[:8]
    edge = max(abs(y - x) for x, y in pairs)
    edges = [edge * (i - 20) / 20 for i in range(41)]
    counts = [sum(low <= y - x < high for x, y in pairs) for low, high in pairwise(edges)]
    words = (" Pythagoras", " 42", "\n\n", "<|im_end|>", " 的", " therefore", "</think>", "=")
    return Comparison(
        distance=distance(scale),
        metrics=METRICS if outside else HEALTHY_METRICS,
        top1_agreement=0.962 if outside else 0.9998,
        topk_overlap=0.941,
        topk_drift=scale * 1.4,
        by_position=tuple(
            Bin(label=label, tokens=count, mean_abs=scale * (0.4 + 0.15 * i), k3=scale**2 * (i + 1))
            for i, (label, count) in enumerate(POSITIONS)
        ),
        by_probability=tuple(
            Bin(label=label, tokens=count, mean_abs=scale * 2.0 ** (2 - i), k3=scale**2 * 4.0 ** (1 - i))
            for i, (label, count) in enumerate(PROBABILITIES)
        ),
        worst=tuple(
            WorstToken(
                row=i // 64,
                position=i % 64,
                token_id=100 + i,
                token=word,
                before="…the sum of the squares of the legs, as",
                after=" said, so c is 5…",
                engine=pairs[i][0],
                trainer=pairs[i][1],
            )
            for i, word in zip(order, words, strict=True)
        ),
        scatter=tuple(pairs[::2]) + tuple(pairs[i] for i in order),
        histogram=tuple((low, high, count) for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)),
    )


SETTINGS = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "checkpoint": "checkpoints/last.ckpt, step 40",
    "engine": "vLLM 0.11.0, bfloat16, kv_cache_dtype fp8, max_num_seqs 32, enable_prefix_caching",
    "trainer": "float32, sdpa, micro_batch_tokens 4096",
    "sampling": "temperature 1, top_p 1, max_new_tokens 64",
    "prompts": "32 of prompts.jsonl",
    "versions": "python 3.11.9, torch 2.9.0, transformers 5.1.0",
}
METRICS = {
    "rollout_correction/kl": 0.0214,
    "rollout_correction/k3_kl": 0.0232,
    "rollout_correction/chi2_token": 0.071,
    "rollout_correction/logprob_abs_diff_mean": 0.172,
    "rollout_correction/logprob_abs_diff_p99": 0.81,
    "rollout_correction/prob_pearson": 0.983,
    "rollout_correction/missing_logprob_fraction": 0.0,
    "rollout_correction/nonfinite_logprob_fraction": 0.002,
    "rollout_correction/ess": 0.94,
    "rollout_correction/abs_diff_at_position/8": 0.19,
}
HEALTHY_METRICS = {
    "rollout_correction/kl": 1.2e-7,
    "rollout_correction/k3_kl": 8e-10,
    "rollout_correction/chi2_token": 1.1e-9,
    "rollout_correction/missing_logprob_fraction": 0.0,
    "rollout_correction/ess": 1.0,
}
POSITIONS = (("0", 32), ("1", 32), ("2-3", 64), ("4-7", 128), ("8-15", 256), ("16-31", 512), ("32-63", 1024))
PROBABILITIES = (
    ("< 0.0001", 11),
    ("0.0001-0.001", 53),
    ("0.001-0.01", 203),
    ("0.01-0.1", 480),
    ("0.1-0.5", 610),
    ("0.5-1", 691),
)
NOISE = (
    NoiseSource(side="engine", name="the same tokens decoded again", distance=distance(0.0), in_floor=True),
    NoiseSource(side="engine", name="half the batch", distance=distance(4.4e-5), in_floor=True),
    NoiseSource(side="engine", name="no prefix cache", distance=distance(2.1e-5), in_floor=True),
    NoiseSource(side="trainer", name="one row at a time", distance=distance(1.3e-6), in_floor=True),
    NoiseSource(side="trainer", name="padded on the left", distance=distance(1.7e-6), in_floor=True),
    NoiseSource(side="trainer", name="attention kernel eager", distance=distance(2.9e-6), in_floor=True),
    NoiseSource(side="trainer", name="in float32", distance=distance(0.0031), in_floor=False),
)
