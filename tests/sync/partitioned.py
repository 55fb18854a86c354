"""Models partitioned by the real DeepSpeed ZeRO-3 over two processes on the CPU, and the memory that work takes."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ranks import WORLD, on_ranks


def on_two_ranks(work: Callable[..., None], store: Path, *args: Any) -> None:
    """Run `work(rank, *args)` in two processes of one gloo group, with every larger tensor in a mapping of its own.

    So memory that malloc kept from earlier work is not mistaken for no use at all.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # read by the processes that are started
    try:
        on_ranks(_in_group, str(store), work, args)
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def _in_group(rank: int, store: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    work(rank, *args)
    dist.destroy_process_group()


def partitioned(model: nn.Module, learning_rate: float = 1e-3) -> Any:
    """Return DeepSpeed's engine around `model`, whose every parameter is partitioned from now on."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # Else it is compiled, for nothing.
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    assert all(parameter.numel() == 0 for parameter in model.parameters()), "not everything was partitioned"
    return engine


def largest_parameter(model: nn.Module) -> int:
    """Bytes of the largest parameter, before it is partitioned."""
    return max(parameter.numel() * parameter.element_size() for parameter in model.parameters())


class LiveBytes(TorchDispatchMode):
    """With-block over which the bytes of tensors made in it and alive at one time are counted, and their most.

    Exact, unlike what the system says is resident; but what gloo allocates for itself is not a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation and count what storage it made."""
        given = {_address(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in (0, *given, *self._alive):
                storage = tensor.untyped_storage()
                self._alive[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self._alive.values()))
        return result


def _address(tensor: Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


class PeakMemory:
    """With-block over which the largest seconds and the largest growth of the resident set of all ranks are taken.

    The growth is that of the high-water mark over what was resident before; the kernel's mark is reset for it.
    """

    seconds: float
    bytes: int

    def __enter__(self) -> PeakMemory:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # The mark falls to what is resident now.
        self._before, self._start = _resident("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        values = [_resident("VmHWM") - self._before, time.perf_counter() - self._start]
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.bytes, self.seconds = int(largest[0]), largest[1].item()


def _resident(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
