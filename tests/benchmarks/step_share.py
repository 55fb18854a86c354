"""Share of a training step that correction and diagnostics take.

python -m tests.benchmarks.step_share MODEL_FOLDER      (a causal language model of the Hugging Face format)

The step is one forward and backward pass over the rows, in runs of MICRO_BATCH_TOKENS as in configs/smollm2.yaml; the
rollout, the old log-probabilities and the optimiser are left out, so the share of a whole step is smaller. Beside it:
`correct`, and `MismatchMetrics` updated and computed with every diagnostic, which is what a step does that logs.

Seconds are the CPU's, over all threads: on a machine that others use, wall-clock time is theirs too. OMP_NUM_THREADS=1
keeps the time that threads wait for each other out of the step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.data.collate import collate
from app.maths.correction import correct, preset
from app.metrics import MismatchMetrics
from app.policy.loading import load_policy
from app.policy.scoring import sampled_logprobs
from app.types import TrainBatch, TrainRow

MICRO_BATCH_TOKENS = 2048
CORRECTION = preset("swift/token_truncate")
REPEATS = 15


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of one optimiser step."""

    rows: int
    """Completions."""
    prompt_tokens: int
    """Tokens of each prompt."""
    max_tokens: int
    """Most tokens of a completion; lengths are spread evenly from a quarter of it."""


SHAPES = (
    Shape(rows=48, prompt_tokens=48, max_tokens=24),  # configs/smollm2.yaml
    Shape(rows=16, prompt_tokens=48, max_tokens=512),
)


def make_batch(shape: Shape, vocabulary: int) -> TrainBatch:
    """Rows of random tokens, sorted by length as the collector leaves them."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

    lengths = torch.linspace(shape.max_tokens / 4, shape.max_tokens, shape.rows).long().tolist()
    rows = [
        TrainRow.of_completion(
            prompt_ids=tokens(shape.prompt_tokens),
            completion_ids=tokens(length),
            rollout_logprobs=None,
            advantage=1.0 if index % 2 else -1.0,
            reward=float(index % 2),
        )
        for index, length in enumerate(lengths)
    ]
    return collate(rows, pad_token_id=0)


def forward_backward(policy: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """One pass as in training; return the log-probabilities [B, T]."""
    new, _ = sampled_logprobs(policy, batch, temperature=1.0, max_tokens=MICRO_BATCH_TOKENS, with_entropy=True)
    (-(new * batch.advantages[:, None] * batch.mask).sum() / batch.mask.sum()).backward()
    policy.zero_grad()
    return new.detach()


def correct_and_measure(metrics: MismatchMetrics, batch: TrainBatch, old: Tensor, rollout: Tensor) -> None:
    """What the correction adds to the step."""
    correct(old, rollout, batch.mask, CORRECTION)
    metrics.update(old, rollout, batch.mask, rewards=batch.rewards, advantages=batch.advantages, policy_lag=0)
    metrics.compute()
    metrics.reset()


def seconds_of(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def report(policy: PreTrainedModel, shape: Shape) -> None:
    """Time one shape and print its line."""
    batch = make_batch(shape, policy.config.vocab_size)
    start = time.process_time()
    old = forward_backward(policy, batch)
    step = time.process_time() - start
    noise = 0.01 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    rollout = torch.where(batch.mask, (old - noise).clamp(max=0.0), 0.0)
    metrics = MismatchMetrics(CORRECTION)
    correct_and_measure(metrics, batch, old, rollout)  # warm-up
    extra = [seconds_of(lambda: correct_and_measure(metrics, batch, old, rollout)) for _ in range(REPEATS)]
    tokens = shape.rows * shape.prompt_tokens + sum(batch.sampled_tokens)
    print(
        f"{shape.rows:4} x {shape.max_tokens:4} {tokens:7} {step:10.2f} {1000 * min(extra):9.2f} "
        f"{1000 * statistics.median(extra):10.2f} {100 * statistics.median(extra) / step:8.3f} %",
        flush=True,
    )


def main(folder: str) -> None:
    """Print a line for each shape."""
    policy = load_policy(folder, "float32", "sdpa")
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    forward_backward(policy, make_batch(Shape(rows=2, prompt_tokens=8, max_tokens=8), policy.config.vocab_size))
    print(f"{parameters / 1e6:.0f}M parameters, float32, {torch.get_num_threads()} threads")
    print(f"{'rows':11} {'tokens':>7} {'step s':>10} {'least ms':>9} {'median ms':>10} {'share':>10}", flush=True)
    for shape in SHAPES:
        report(policy, shape)


if __name__ == "__main__":
    main(sys.argv[1])
