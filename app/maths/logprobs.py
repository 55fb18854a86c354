"""Log-probabilities of chosen tokens without ever holding the logits of all of them.

At 128k vocabulary entries the float32 logits of 16k tokens take 8 GiB, and log-softmax and its backward several
times that. So the head runs on a few rows at a time, and each chunk's logits are computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def selected_logprobs(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    temperature: float,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    min_chunks: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of one token per row under softmax(logits / temperature), and the entropy of that softmax.

    Only one chunk's logits exist at a time, in forward and in backward. `lm_head` is *called*, once per chunk and
    once more in backward, so that the hooks of ZeRO-3 gather its weight. Each call is then a collective: ranks with
    unequal row counts must agree on `min_chunks`, the largest number of chunks of any rank, or they wait for each
    other for ever. Chunks beyond the rows have no rows; N = 0 runs one of them.

    Args:
        hidden: [N, H], the state that predicts `token_ids`.
        lm_head: hidden [n, H] -> logits [n, V].
        token_ids: [N] int64.
        temperature: the logits are divided by it, as the engine did when it sampled.
        chunk_size: rows per call of the head.
        with_entropy: return the entropy too; it carries no gradient.
        min_chunks: least number of calls of the head.

    Returns:
        Log-probabilities [N] and entropy [N] (or None), both in nats: float64 if `hidden` is, else float32.

    Raises:
        ValueError: on shapes that do not fit, or a temperature or chunk size that is not above 0.
    """
    if hidden.dim() != 2 or token_ids.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be [N, H] and token_ids {tuple(token_ids.shape)} [N].")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: log-probabilities need a temperature above 0.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: rows per chunk must be 1 or more.")

    def score(chunk: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _score_chunk(lm_head(chunk), ids, temperature, with_entropy)

    logprobs, entropies = [], []
    for index in range(max(min_chunks, 1, -(-len(hidden) // chunk_size))):
        rows = slice(index * chunk_size, (index + 1) * chunk_size)
        if torch.is_grad_enabled():
            chunk_logprobs, chunk_entropy = checkpoint(score, hidden[rows], token_ids[rows], use_reentrant=False)
        else:
            chunk_logprobs, chunk_entropy = score(hidden[rows], token_ids[rows])
        logprobs.append(chunk_logprobs)
        entropies.append(chunk_entropy)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _score_chunk(logits: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n] and entropy [n] (empty unless asked for) of one chunk's logits [n, V]."""
    if logits.dtype != torch.float64:
        logits = logits.float()  # a bf16 log-softmax is wrong in the third digit
    if temperature != 1:
        logits = logits / temperature
    logp = torch.log_softmax(logits, dim=-1)
    del logits  # each [n, V] tensor that stays is 0.5 GiB at 1024 rows of 128k
    selected = logp.gather(-1, token_ids[:, None]).squeeze(-1)
    return selected, _entropy(logp) if with_entropy else selected.new_empty(0)


@torch.no_grad()
def _entropy(logp: Tensor) -> Tensor:
    """-sum p log p over the last dimension; a token of probability 0 counts 0, where the product would be NaN."""
    probs = logp.exp()
    return torch.special.entr(probs, out=probs).sum(dim=-1)
