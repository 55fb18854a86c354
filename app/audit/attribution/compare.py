"""Engine and trainer on the same tokens: overall, by position, by probability, and the worst tokens in context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from app.audit.attribution.distance import distance
from app.audit.types import AuditRow, Bin, Comparison, TokenScores, WorstToken
from app.maths.divergence import LOG_RATIO_BOUND, kl_sampler_target_k3
from app.metrics import diagnose, position
from app.metrics.core import MAX_K3

CONTEXT = 60
"""Most characters shown before a token, and after it."""
INNER_BINS = 61
"""Number of equal bins in the histogram; odd, so that the middle one is centred on 0."""
INNER_SHARE = 0.995
"""Share of tokens that these bins cover: one token of 20 nats must not squeeze all others into one bin."""
PROBABILITIES = (0.5, 0.1, 0.01, 0.001, 0.0001)
"""Lower edges of the probability ranges; below the last one is one more range."""


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """The tokens that are finite on both sides, N' of N."""

    index: Tensor
    """[N'] int64: indices among all N tokens."""
    engine: Tensor
    """[N'] float64: log-probabilities of the engine, nats."""
    trainer: Tensor
    """[N'] float64: log-probabilities of the trainer, nats."""

    @property
    def difference(self) -> Tensor:
        """l = trainer - engine, [N']."""
        return self.trainer - self.engine


def compare(
    rows: Sequence[AuditRow],
    engine: TokenScores,
    trainer: TokenScores,
    tokenizer: PreTrainedTokenizerBase,
    *,
    worst: int = 20,
    scatter: int = 1500,
    seed: int = 0,
) -> Comparison:
    """Compare both sides' scores of every completion token of `rows`.

    Tokens without a finite log-probability on both sides are left out everywhere; the metrics
    `missing_logprob_fraction` and `nonfinite_logprob_fraction` count them.

    Args:
        rows: the sampled rows, N completion tokens in all.
        engine: scores of the N tokens by the engine.
        trainer: scores of the N tokens by the trainer.
        tokenizer: decodes the worst tokens and their context.
        worst: number of worst tokens to return.
        scatter: most points in the scatter plot.
        seed: seed for the choice of these points.

    Raises:
        ValueError: if a side has not one log-probability for each completion token.
    """
    lengths = [len(row.completion_ids) for row in rows]
    for name, side in (("engine", engine), ("trainer", trainer)):
        if side.logprobs.shape != (sum(lengths),):
            raise ValueError(
                f"{name}.logprobs has shape {tuple(side.logprobs.shape)}, expected ({sum(lengths)},): one for each "
                f"completion token of the {len(lengths)} rows."
            )
    index = (engine.logprobs.isfinite() & trainer.logprobs.isfinite()).nonzero().squeeze(1)
    counted = _Counted(index=index, engine=engine.logprobs[index].double(), trainer=trainer.logprobs[index].double())
    places = torch.cat([torch.arange(length) for length in lengths])
    order = counted.difference.abs().argsort(descending=True, stable=True)
    agreement, overlap, top_difference = _top_tokens(engine, trainer, index)
    return Comparison(
        distance=distance(engine.logprobs, trainer.logprobs),
        metrics=_metrics(lengths, engine.logprobs, trainer.logprobs),
        top1_agreement=agreement,
        topk_overlap=overlap,
        topk_drift=top_difference,
        by_position=_by_position(places[index], counted.difference),
        by_probability=_by_probability(counted),
        worst=_worst(rows, counted, order[:worst].tolist(), tokenizer),
        scatter=_scatter(counted, order, worst, scatter, seed),
        histogram=histogram(counted.difference),
    )


def _metrics(lengths: Sequence[int], engine: Tensor, trainer: Tensor) -> dict[str, float]:
    """The diagnostics of training, computed on padded rows [B, T]."""

    def padded(values: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values.double().split(list(lengths)), batch_first=True)

    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return diagnose(padded(trainer), padded(engine), mask)


def _top_tokens(
    engine: TokenScores, trainer: TokenScores, index: Tensor
) -> tuple[float | None, float | None, float | None]:
    """Agreement of the likeliest token, overlap of the K likeliest, and mean |l| over those that both sides have."""
    if engine.top_ids is None or trainer.top_ids is None or not len(index):
        return None, None, None
    k = min(engine.top_ids.shape[1], trainer.top_ids.shape[1])
    ours, theirs = trainer.top_ids[index, :k], engine.top_ids[index, :k]
    shared = ours[:, :, None] == theirs[:, None, :]  # [N', K, K]
    agreement = (ours[:, 0] == theirs[:, 0]).double().mean().item()
    overlap = shared.any(2).double().mean().item()
    if engine.top_logprobs is None or trainer.top_logprobs is None:
        return agreement, overlap, None
    gaps = trainer.top_logprobs[index, :k, None] - engine.top_logprobs[index, None, :k]
    sizes = gaps[shared].abs()
    sizes = sizes[sizes.isfinite()]  # outside of the sampling support a log-probability is -inf
    return agreement, overlap, sizes.mean().item() if len(sizes) else None


def _by_position(places: Tensor, difference: Tensor) -> tuple[Bin, ...]:
    """Bins of `app.metrics.position`; `places` [N'] are positions in the completion."""
    starts = position.STARTS
    labels = [f"{first}" if end == first + 1 else f"{first}-{end - 1}" for first, end in pairwise(starts)]
    bin_of = torch.bucketize(places, torch.tensor(starts), right=True) - 1
    return _bins([*labels, f"≥{starts[-1]}"], bin_of, difference)


def _by_probability(counted: _Counted) -> tuple[Bin, ...]:
    """Bins by the geometric mean of both probabilities.

    Binning by one side's probability would show a bias that does not exist: among the tokens that are rare for one side
    are those that it rounded down, and the other side is higher on them.
    """
    low = PROBABILITIES
    labels = [f"≥{low[0]}", *(f"{below}-{above}" for above, below in pairwise(low)), f"<{low[-1]}"]
    edges = torch.tensor(low, dtype=torch.float64).log()
    middle = (counted.engine + counted.trainer) / 2
    return _bins(labels, (middle[:, None] < edges).sum(1), counted.difference)


def _bins(labels: Sequence[str], bin_of: Tensor, difference: Tensor) -> tuple[Bin, ...]:
    """The bins that have tokens; `bin_of` [N'] int64 is each token's."""
    k3 = kl_sampler_target_k3(difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).clamp(max=MAX_K3)
    found = []
    for number, label in enumerate(labels):
        inside = bin_of == number
        if tokens := int(inside.sum()):
            mean_abs, mean_k3 = difference[inside].abs().mean().item(), k3[inside].mean().item()
            found.append(Bin(label=label, tokens=tokens, mean_abs=mean_abs, k3=mean_k3))
    return tuple(found)


def _worst(
    rows: Sequence[AuditRow], counted: _Counted, picked: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[WorstToken, ...]:
    """The tokens `picked` from the counted ones, in that order."""
    where = [(number, place) for number, row in enumerate(rows) for place in range(len(row.completion_ids))]
    found = []
    for token in picked:
        number, place = where[counted.index[token]]
        row = rows[number]
        own = row.completion_ids[place]
        before = (row.prompt_ids + row.completion_ids[:place])[-CONTEXT:]
        after = row.completion_ids[place + 1 :][:CONTEXT]
        found.append(
            WorstToken(
                row=number,
                position=place,
                token_id=own,
                token=token_text(own, tokenizer),
                before=shortened(text(before, tokenizer), at_end=False),
                after=shortened(text(after, tokenizer), at_end=True),
                engine=counted.engine[token].item(),
                trainer=counted.trainer[token].item(),
            )
        )
    return tuple(found)


def text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of ids on one line, with special tokens; newlines and unprintable characters are escaped."""
    decoded = str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in decoded)


def token_text(token_id: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of one id; if it decodes to nothing its name in the vocabulary, or else its number."""
    return text([token_id], tokenizer) or str(tokenizer.convert_ids_to_tokens(token_id) or f"<id {token_id}>")


def shortened(line: str, *, at_end: bool) -> str:
    """Return at most CONTEXT characters of `line`, its beginning if it is cut `at_end`, its end otherwise."""
    if len(line) <= CONTEXT:
        return line
    return line[: CONTEXT - 1] + "…" if at_end else "…" + line[1 - CONTEXT :]


def _scatter(counted: _Counted, order: Tensor, worst: int, points: int, seed: int) -> tuple[tuple[float, float], ...]:
    """(engine, trainer) of up to `points` tokens in order: the worst, and a random sample of the others."""
    rest = order[worst:]
    drawn = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    picked = torch.cat([order[:worst], drawn])[:points].sort().values
    return tuple(zip(counted.engine[picked].tolist(), counted.trainer[picked].tolist(), strict=True))


def histogram(difference: Tensor) -> tuple[tuple[float, float, int], ...]:
    """Return the counts of l [N'] as (from, to, tokens): equal bins around 0, and one more at each end.

    The equal bins reach to the percentile INNER_SHARE of |l|, those at the ends from there to the largest |l|; the ends
    are left out if both are empty. Empty without tokens. If every l is 0 the bins reach to 1e-6, where float32 rounding
    begins.
    """
    if not len(difference):
        return ()
    size = difference.abs().sort().values
    largest = size[-1].item()
    reach = size[min(int(INNER_SHARE * len(size)), len(size) - 1)].item() or largest or 1e-6
    edges = torch.linspace(-reach, reach, INNER_BINS + 1, dtype=torch.float64)
    beyond_low, beyond_high = int((difference < -reach).sum()), int((difference > reach).sum())
    inner = difference[difference.abs() <= reach]
    counts = torch.bucketize(inner, edges[1:-1], right=True).bincount(minlength=INNER_BINS).tolist()
    bins = [(low, high, count) for (low, high), count in zip(pairwise(edges.tolist()), counts, strict=True)]
    if beyond_low or beyond_high:
        bins = [(-largest, -reach, beyond_low), *bins, (reach, largest, beyond_high)]
    return tuple(bins)
