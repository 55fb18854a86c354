"""DeepSpeed folders across ZeRO stages, numbers of processes and strategies: real engines, gloo, float32 on the CPU.

The truth is torch's AdamW in one process on the same batches.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

from app.checkpoint.integrity import fault
from app.checkpoint.torch_io import AtomicCheckpointIO
from app.checkpoint.weights import read_weights
from app.checkpoint.zero import ZeroFolder
from app.world import World
from tests.ranks import on_ranks

pytest.importorskip("deepspeed")
BEFORE, AFTER = 3, 3
"""Steps before and after a checkpoint."""


class Net(nn.Module):
    """Sizes that two processes do not divide, a tied weight and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 5, bias=False)
        self.middle = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        return self.head(self.middle(self.norm(self.embed(x)).tanh()))


def loss_of(model, step):
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
    return ((model(x) - x.roll(1, 1)) ** 2).mean()


def optimizer_of(model):
    """Two groups with different weight decay, as in training."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def train_plainly(steps):
    model = Net()
    model.count += 7
    optimizer = optimizer_of(model)
    losses = [step_plainly(model, optimizer, step) for step in range(steps)]
    return model, optimizer, losses


def step_plainly(model, optimizer, step):
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def engine_of(stage, sub_group_size=10**9):
    import deepspeed

    model = Net()
    return deepspeed.initialize(
        args=Namespace(device_rank=0),
        model=model,
        optimizer=optimizer_of(model),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": sub_group_size,
            },
        },
    )[0]


def run_engine(engine, steps):
    losses = []
    for step in steps:
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def work(rank, size, store, jobs, evaluated):
    """One process of a world that saves and resumes.

    Args:
        jobs: (ZeRO stage, sub-group size, folder to save to or None, checkpoint to go on from or None).
        evaluated: checkpoints whose weights alone are loaded, under ZeRO-3 and ZeRO-2.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    import deepspeed
    import deepspeed.ops

    from app.checkpoint.deepspeed import load_training, load_weights, save_folder

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for nothing
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    deepspeed.init_distributed("gloo")
    world = World()
    truth = train_plainly(BEFORE + AFTER)[2]
    for stage, sub_group_size, target, source in jobs:
        engine = engine_of(stage, sub_group_size)
        if source is None:
            engine.module.count += 7
            losses = run_engine(engine, range(BEFORE))
            assert losses == pytest.approx(truth[:BEFORE], abs=1e-5)
            client = {"global_step": BEFORE, "state_dict": "left out"}
            save_folder(engine, client, Path(target), world, exclude_frozen=False)
            continue
        scratch = Path(store).parent / f"scratch{size}"
        client = load_training(engine, Path(source), scratch, world)
        assert client["global_step"] == BEFORE
        assert engine.module.count.tolist() == [7, 7, 7]
        losses = run_engine(engine, range(BEFORE, BEFORE + AFTER))
        assert losses == pytest.approx(truth[BEFORE:], abs=1e-5), (stage, source)
        if target is not None:  # a checkpoint of a resumed engine is one too
            save_folder(engine, {"global_step": BEFORE + AFTER}, Path(target), world, exclude_frozen=False)
    weights = dict(train_plainly(BEFORE)[0].named_parameters())
    for source in evaluated:
        for stage in (2, 3):
            module = engine_of(stage).module
            assert load_weights(module, Path(source))["global_step"] == BEFORE
            for name, parameter in module.named_parameters():
                with deepspeed.zero.GatheredParameters([parameter]):
                    assert torch.allclose(parameter, weights[name], atol=1e-6), name
            assert module.count.tolist() == [7, 7, 7]
    world.gather(None)
    assert not (Path(store).parent / f"scratch{size}").exists()
    torch.distributed.destroy_process_group()


def spawn(folder, size, jobs, evaluated=()):
    store = folder / f"store{len(list(folder.iterdir()))}"
    on_ranks(work, size, str(store), jobs, [str(folder / name) for name in evaluated], world=size)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folders of two processes (1-2, 2-2, 3-2; 3s-2 has several sub-groups to a group) and a file of one."""
    folder = tmp_path_factory.mktemp("written")
    plan = {"1-2": (1, 10**9), "2-2": (2, 10**9), "3-2": (3, 10**9), "3s-2": (3, 20)}
    spawn(folder, 2, [(stage, size, str(folder / name), None) for name, (stage, size) in plan.items()])
    model, optimizer, _ = train_plainly(BEFORE)
    file = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "global_step": BEFORE,
    }
    torch.save(file, folder / "file")
    return folder


FOLDERS = ["1-2", "2-2", "3-2", "3s-2"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_reads_as_what_torch_would_have(written, name):
    assert fault(written / name) is None
    assert ZeroFolder(written / name).size == 2
    model, optimizer, losses = train_plainly(BEFORE)
    for key, value in model.state_dict().items():
        assert torch.allclose(read_weights(written / name)[key], value, atol=1e-6), key
    checkpoint = AtomicCheckpointIO().load_checkpoint(written / name)
    assert checkpoint["global_step"] == BEFORE
    truth, found = optimizer.state_dict(), checkpoint["optimizer_states"][0]
    assert [group["params"] for group in found["param_groups"]] == [[0, 1], [2, 3, 4]]
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.5, 0.0]
    for i, state in truth["state"].items():
        for key, value in state.items():
            assert torch.allclose(found["state"][i][key], value, atol=1e-6), (i, key)
    resumed = Net()
    resumed.load_state_dict(checkpoint["state_dict"])
    after = optimizer_of(resumed)
    after.load_state_dict(found)
    for step in range(BEFORE, BEFORE + AFTER):
        step_plainly(model, optimizer, step)
        losses.append(step_plainly(resumed, after, step))
    assert losses == pytest.approx(train_plainly(BEFORE + AFTER)[2], abs=1e-5)


@pytest.mark.slow
def test_two_processes_to_one_and_back_and_between_stages(written):
    one = [
        (2, 10**9, None, "2-2"),
        (3, 10**9, "3-1", "3-2"),
        (1, 10**9, None, "3s-2"),
        (3, 10**9, None, "2-2"),
        (2, 10**9, None, "file"),
    ]
    fresh = [(2, 10**9, "2-1", None), (3, 10**9, "3-1f", None)]
    two = [
        (2, 10**9, None, "2-1"),
        (3, 10**9, None, "3-1f"),
        (3, 20, None, "2-2"),
        (1, 10**9, None, "3-2"),
        (3, 10**9, None, "file"),
        (3, 10**9, None, "3-2"),  # this one DeepSpeed loads by itself
    ]

    def whole(jobs):
        return [(s, g, t and str(written / t), f and str(written / f)) for s, g, t, f in jobs]

    spawn(written, 1, whole(fresh + one))
    spawn(written, 2, whole(two), evaluated=["3-2", "2-1", "file"])
    model = train_plainly(BEFORE + AFTER)[0]
    for key, value in read_weights(written / "3-1").items():
        assert torch.allclose(value, model.state_dict()[key], atol=1e-5), key


def fill_disk(rank, store, folder):
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    import resource
    import signal

    import deepspeed
    import deepspeed.ops

    from app.checkpoint.deepspeed import save_folder
    from app.checkpoint.files import SaveError

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    deepspeed.init_distributed("gloo")
    engine = engine_of(3)
    run_engine(engine, range(1))
    save_folder(engine, {"global_step": 1}, Path(folder), World(), exclude_frozen=False)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(SaveError, match=r"^File too large \(rank 1\)$"):
        save_folder(engine, {"global_step": 2}, Path(folder), World(), exclude_frozen=False)
    torch.distributed.destroy_process_group()


def test_a_full_disk_on_one_rank_stops_all_and_leaves_the_old_folder(tmp_path):
    on_ranks(fill_disk, str(tmp_path / "store"), str(tmp_path / "z" / "step=1.ckpt"))
    assert os.listdir(tmp_path / "z") == ["step=1.ckpt"]
    assert ZeroFolder(tmp_path / "z" / "step=1.ckpt").state().lightning["global_step"] == 1
