"""Gathering and syncing under the real DeepSpeed ZeRO-3, two processes on the CPU."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from app.rollout.transformers_engine import TransformersEngine
from app.sync.synchroniser import WeightSynchroniser
from app.weights.gather import full_shapes, named_full_parameters
from tests.sync.tiny_model import load_tiny, save_tiny, score

pytestmark = pytest.mark.slow


def _train_and_sync(rank: int, folder: str, store: str) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # Else it is compiled, for nothing.
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    deepspeed.init_distributed("gloo")
    model = load_tiny(Path(folder))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    assert all(parameter.numel() == 0 for parameter in model.parameters()), "nothing was partitioned"
    assert full_shapes(model) == {name: tensor.shape for name, tensor in start.items()}
    for name, tensor in named_full_parameters(model):
        assert torch.equal(tensor, start[name])

    loss = trainer(torch.full((1, 8), 9 + rank)).logits.logsumexp(-1).mean()
    trainer.backward(loss)
    trainer.step()
    rollout = TransformersEngine(device="cpu")
    rollout.start(folder, seed=0)
    report = WeightSynchroniser(rollout, verify="logprobs").sync(model, 1, partial(score, model))
    assert report.canary is not None
    assert report.canary.mean_abs_diff < 1e-5
    moved = dict(rollout._model.named_parameters())
    assert all(not torch.equal(moved[name], tensor) for name, tensor in start.items())
    torch.distributed.destroy_process_group()


def test_partitioned_weights_arrive_whole(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folder = save_tiny(tmp_path / "tiny")
    mp.spawn(_train_and_sync, args=(str(folder), str(tmp_path / "store")), nprocs=2)
