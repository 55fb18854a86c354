"""Batches that are halved until they fit."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from app.engine.batching import FittingBatches, OutOfMemory, is_out_of_memory
from app.engine.errors import EngineError, EngineFailure
from app.engine.vllm.failures import broken_off, start_fault
from app.types import Request

REQUESTS = [Request(token_ids=(i + 1,), seed=i) for i in range(11)]


class Memory:
    """Holds so many requests at once; an engine works on at most `largest` of a call."""

    def __init__(self, holds: int, largest: int = 100) -> None:
        self.holds = holds
        self.largest = largest
        self.sizes: list[int] = []

    def call(self, requests):
        self.sizes.append(len(requests))
        if min(len(requests), self.largest) > self.holds:
            raise OutOfMemory("full")
        return [request.seed for request in requests]


def test_without_trouble_all_requests_are_one_call():
    memory = Memory(holds=11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FittingBatches(100).run(REQUESTS, memory.call) == list(range(11))
    assert memory.sizes == [11]
    assert FittingBatches(100).run([], memory.call) == []


def test_parts_are_halved_until_they_fit_and_the_size_is_kept():
    memory, batches = Memory(holds=3), FittingBatches(100)
    with pytest.warns(
        UserWarning, match=r"with 11 requests at once; .* parts of 2, .*data\.engine\.max_num_seqs"
    ) as seen:
        assert batches.run(REQUESTS, memory.call) == list(range(11))
    assert len(seen) == 1
    assert memory.sizes == [11, 5, 2, 2, 2, 2, 2, 1]
    memory.sizes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert batches.run(REQUESTS[:4], memory.call) == [0, 1, 2, 3]
    assert memory.sizes == [2, 2]


def test_halving_starts_from_what_the_engine_works_on_at_once():
    memory, batches = Memory(holds=3, largest=4), FittingBatches(4)
    with pytest.warns(UserWarning, match=r"with 4 requests at once; .* parts of 2"):
        assert batches.run(REQUESTS, memory.call) == list(range(11))
    assert memory.sizes == [11, 2, 2, 2, 2, 2, 1]


def test_one_request_that_does_not_fit_is_an_error_with_advice():
    with pytest.raises(EngineError, match=r"one request alone .*: full; lower data\.engine\.max_num_seqs") as caught:
        FittingBatches(100).run(REQUESTS, Memory(holds=0).call)
    assert not isinstance(caught.value, EngineFailure)  # a restart would not mend it


def test_other_errors_pass():
    def call(requests):
        raise EngineFailure("dead")

    with pytest.raises(EngineFailure, match="dead"):
        FittingBatches(100).run(REQUESTS, call)


def test_what_counts_as_out_of_memory():
    wrapped = ValueError("worker failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), cpu, wrapped):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes differ"), ValueError("out of memory"), KeyError("can't allocate memory")):
        assert not is_out_of_memory(error)


def test_the_cpu_allocator_says_what_is_looked_for():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_what_vllms_errors_mean():
    error = RuntimeError("shapes differ\nsecond line")
    for found, kind, text in (
        (broken_off(error, refused=False), EngineFailure, "vLLM failed to generate: RuntimeError: shapes differ"),
        (broken_off(error, refused=True), EngineError, "vLLM refused the requests: RuntimeError: shapes differ"),
        (broken_off(MemoryError(), refused=True), OutOfMemory, "vLLM ran out of memory: MemoryError: no message"),
    ):
        assert (type(found), str(found)) == (kind, text)


@pytest.mark.parametrize(("args", "key"), [
    ({"kv_cache_memory_bytes": 9, "gpu_memory_utilization": 0.4}, r"kv_cache_memory_bytes \(9\)"),
    ({"gpu_memory_utilization": 0.4}, r"gpu_memory_utilization \(0\.4\)"),
])  # fmt: skip
def test_a_cache_too_small_names_the_key_that_decides_its_size(args, key):
    error = ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
    found = start_fault(error, args)
    assert re.search(rf"raise data\.engine\.{key} or lower data\.engine\.max_model_len", found)
    assert "Try increasing" not in found
    assert start_fault(ValueError("Unsupported KV cache dtype"), args) == "Unsupported KV cache dtype"
