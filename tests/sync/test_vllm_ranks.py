"""Two ranks, each with its own vLLM beside the trainer's process group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from app.engine.vllm.engine import VLLMEngine
from app.types import Request, SamplingConfig
from tests.ranks import free_port, on_ranks
from tests.sync.tiny_model import load_tiny, perturb, save_tiny, synchroniser_of


def _sum_of_ranks() -> float:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total.item()


def _sample_and_sync(rank: int, folder: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    engine = VLLMEngine(dtype="float32", max_model_len=128, kv_cache_memory_bytes=32 << 20)
    engine.start(folder, seed=0)
    model = perturb(load_tiny(Path(folder)), seed=1)
    synchroniser_of(engine).sync(model, 1)
    # Ranks need not keep step while sampling: another number of requests, of another length.
    requests = [Request(token_ids=(9, 10 + rank), seed=seed) for seed in range(2 + rank)]
    assert len(engine.generate(requests, SamplingConfig(max_tokens=8 * (rank + 1)))) == 2 + rank
    assert _sum_of_ranks() == 3
    engine.close()
    # vLLM's own shutdown destroys the default group, which is the trainer's.
    assert _sum_of_ranks() == 3
    dist.destroy_process_group()


def test_engines_live_beside_the_process_group_and_leave_it(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, or none")
    folder = save_tiny(tmp_path / "tiny")
    on_ranks(_sample_and_sync, str(folder), free_port())
