from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.weights import checksum as module
from app.weights.checksum import checksum, with_tied

CHUNK = module.CHUNK_BYTES // 4
"""Float32 elements of one chunk."""


def _reference(tensor: torch.Tensor) -> int:
    """Multilinear hash in plain Python integers, word by word."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    keys = module._keys(torch.device("cpu")).tolist()
    sums = []
    for start in range(0, len(raw), module.CHUNK_BYTES):
        chunk = raw[start : start + module.CHUNK_BYTES]
        words = [int.from_bytes(chunk[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(chunk), 8)]
        total = sum(key * word for key, word in zip(keys, words, strict=False)) % 2**64
        sums.append(total - 2**64 if total >= 2**63 else total)
    folded = 0
    for word in (*tensor.shape, *sums):
        folded = (folded * module.MULTIPLIER + word + 1) % 2**64
    return folded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (64, 33), (0, 4)])
def test_equals_the_hash_in_python_integers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert checksum(tensor) == _reference(tensor)


def test_equals_the_hash_across_chunks() -> None:
    tensor = torch.randn(CHUNK + 5, generator=torch.Generator().manual_seed(2))
    assert checksum(tensor) == _reference(tensor)


@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 98), bit=st.integers(0, 15), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_every_single_bit_counts(index: int, bit: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(99, generator=torch.Generator().manual_seed(3)).to(dtype)
    flipped = tensor.clone()
    flipped.view(torch.int16)[index] ^= -(2**15) if bit == 15 else 2**bit
    assert checksum(flipped) != checksum(tensor)


def test_position_counts_within_and_across_chunks() -> None:
    tensor = torch.arange(2 * CHUNK, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[10, 11]] = tensor[[11, 10]]
    chunks_swapped = torch.cat((tensor[CHUNK:], tensor[:CHUNK]))
    reshaped = tensor.view(2, CHUNK)
    assert len({checksum(each) for each in (tensor, swapped, chunks_swapped, reshaped, tensor.view(CHUNK, 2))}) == 5


def test_views_equal_their_copies() -> None:
    tensor = torch.randn(31, 17).to(torch.bfloat16)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(tensor[1:, 3]) == checksum(tensor[1:, 3].clone())
    assert checksum(tensor.flatten()[1:]) == checksum(tensor.flatten()[1:].clone())


def test_casts_as_the_engine_does_and_ignores_the_sign_of_zero() -> None:
    tensor = torch.randn(1000)
    assert checksum(tensor, torch.bfloat16) == checksum(tensor.to(torch.bfloat16))
    assert checksum(torch.tensor([-0.0, 1.0])) == checksum(torch.tensor([0.0, 1.0]))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        checksum(torch.ones(3, dtype=torch.int64))


class TiedTwice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.own = torch.nn.Linear(3, 3, bias=False)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.second = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.second.weight = self.embed.weight


def test_a_tied_weight_has_its_checksum_under_each_of_its_names() -> None:
    model, sums = TiedTwice(), {"embed.weight": 7, "own.weight": 8}
    assert with_tied(sums, model) == {**sums, "head.weight": 7, "second.weight": 7}
    assert with_tied(sums, model, listed=["head.weight"]) == {**sums, "head.weight": 7}
    assert with_tied(sums, model, listed=[]) == sums  # an engine without a head of its own
    assert sums == {"embed.weight": 7, "own.weight": 8}


def test_without_a_checksum_of_its_own_a_tied_weight_has_none_elsewhere() -> None:
    assert with_tied({"own.weight": 8}, TiedTwice()) == {"own.weight": 8}
