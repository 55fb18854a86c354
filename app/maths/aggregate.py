"""From per-token values to a scalar, by a denominator of the whole optimiser step that is passed in.

Because the denominator is global, the scalars of micro-batches and ranks *sum* to the value over all data at once;
a mean of means would weigh short micro-batches too much.
"""

from __future__ import annotations

from torch import Tensor

from app.maths.masking import masked_sum


def token_mean(values: Tensor, mask: Tensor, total_tokens: int) -> Tensor:
    """Sum over valid tokens / total tokens: every token weighs the same (DAPO, arXiv 2503.14476).

    Args:
        values: [B, T], 0 at tokens that training drops.
        mask: [B, T] bool, tokens that count: valid, *before* rejection unless asked otherwise.
        total_tokens: such tokens of the whole optimiser step.
    """
    return masked_sum(values, mask) / max(total_tokens, 1)


def row_mean(values: Tensor, mask: Tensor, total_rows: int) -> Tensor:
    """Sum over rows of the row's token mean / total rows: every row weighs the same (GRPO, arXiv 2402.03300).

    Args:
        values: [B, T], 0 at tokens that training drops.
        mask: [B, T] bool, tokens that count, see `token_mean`; they are a row's length.
        total_rows: rows with such a token, of the whole optimiser step.
    """
    lengths = mask.sum(dim=1).clamp(min=1)
    return (masked_sum(values, mask, dim=1) / lengths).sum() / max(total_rows, 1)


def constant_length(values: Tensor, mask: Tensor, total_rows: int, max_length: int) -> Tensor:
    """Sum over valid tokens / (total rows * max length): no bias by length (Dr. GRPO, arXiv 2503.20783).

    Args:
        values: [B, T], 0 at tokens that training drops.
        mask: [B, T] bool, tokens that count, see `token_mean`.
        total_rows: rows with such a token, of the whole optimiser step.
        max_length: the length limit of a completion, in tokens.
    """
    return masked_sum(values, mask) / (max(total_rows, 1) * max_length)


def micro_batch_token_mean(values: Tensor, mask: Tensor, micro_batches: int) -> Tensor:
    """The micro-batch's sum / its own tokens / number of micro-batches: the mean of their token means (TRL's "bnpo").

    The gradient depends on how the optimiser step is cut into micro-batches and ranks: the tokens of a micro-batch
    with few weigh more. `token_mean` does not have that fault.

    Args:
        values: [B, T] of one micro-batch, 0 at tokens that training drops.
        mask: [B, T] bool, tokens that count, see `token_mean`.
        micro_batches: of the whole optimiser step, over all ranks; one without tokens adds 0 but is counted.
    """
    return masked_sum(values, mask) / mask.sum().clamp(min=1) / micro_batches
