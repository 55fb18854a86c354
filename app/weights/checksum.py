"""A checksum of a tensor's bits, computed where the tensor lies.

Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 57(11),
2014, arXiv:1202.4961): h = sum_i key_i * word_i over 64-bit words, modulo 2^64. The keys are odd, so a change of any
one word always changes the sum of its chunk; they differ by position, so moved or swapped words change it too.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from app.weights.gather import tied_names

CHUNK_BYTES = 1 << 21
"""Bytes read at a time. It bounds the temporaries (two chunks); on a CPU they then stay in the cache."""
MODULUS = 1 << 64
MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so multiplying by it loses nothing: it folds the chunk sums so that their order counts."""


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return a 64-bit checksum of the shape, the order and the bits of `tensor`, cast to `dtype` if given.

    Equal tensors have equal checksums on every device; -0.0 counts as 0.0, which no model can tell apart.
    The cast is done chunk by chunk, so no second copy of the tensor is made (a non-contiguous one is copied).

    Raises:
        TypeError: if the tensor (after the cast) is not of a floating-point dtype of 2, 4 or 8 bytes.
    """
    dtype = dtype or tensor.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"checksum: expected float16, bfloat16, float32 or float64, got {dtype}")
    flat = tensor.detach().reshape(-1)
    step = CHUNK_BYTES // dtype.itemsize
    keys = _keys(tensor.device)
    sums = [_chunk_sum(flat[start : start + step].to(dtype), keys) for start in range(0, flat.numel(), step)]
    total = 0
    for word in (*tensor.shape, *(torch.stack(sums).tolist() if sums else ())):
        total = (total * MULTIPLIER + word + 1) % MODULUS
    return total


def with_tied(checksums: Mapping[str, int], model: nn.Module, listed: Container[str] | None = None) -> dict[str, int]:
    """Return `checksums` of `model`, to which those of tied weights are added under each further name.

    The rule: a tied weight travels once, under the name that `named_full_parameters` gives it, and has that checksum
    under each of its names. A further name is left out where there is no checksum to give it, and where `listed` is
    given and lacks it: an engine without a head of its own (vLLM's Gemma) computes the logits from the embedding.

    Args:
        checksums: by Hugging Face name, each weight once.
        model: whose parameters are tied.
        listed: names that the other side of a comparison has; None: every name counts.
    """
    further = {
        name: checksums[owner]
        for name, owner in tied_names(model).items()
        if owner in checksums and (listed is None or name in listed)
    }
    return {**checksums, **further}


def _chunk_sum(chunk: Tensor, keys: Tensor) -> Tensor:
    # Adding 0 turns -0.0 into 0.0 and gives a fresh, aligned tensor, which `view` needs.
    chunk = chunk + 0
    per_word = 8 // chunk.element_size()
    if chunk.numel() % per_word:
        chunk = torch.nn.functional.pad(chunk, (0, per_word - chunk.numel() % per_word))
    words = chunk.view(torch.int64)
    return (words * keys[: len(words)]).sum()


@functools.lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """Return the [CHUNK_BYTES / 8] odd random keys, the same on every device and in every process."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (CHUNK_BYTES // 8,), generator=generator, dtype=torch.int64)
    return (keys | 1).to(device)
