"""Two processes as two machines: launched by others, asked to end, killed, stopped. With the whole command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.test_processes import gone
from tests.distributed.test_stop_signals import fake_scontrol
from tests.ranks import free_port
from tests.runs import COMMAND, ENVIRONMENT, ROOT, assert_equal_weights, last_weights, quickstart_args

pytestmark = pytest.mark.slow
PATIENCE = 600.0
"""Seconds until a test gives up on a run; on a busy machine a run may be slow."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def fit(folder: Path, *arguments: str) -> list[str]:
    """The quickstart with DDP, small, with a checkpoint at every rollout's end."""
    return quickstart_args(
        *(folder, "--trainer.strategy", "ddp", "--data.val", "null", "--data.prompts_per_rollout", "8"),
        *("--checkpoint.every_n_train_steps", "1", *arguments),
    )


@contextlib.contextmanager
def started(commands: list[list[str]], log: Path, variables: list[dict[str, str]]) -> Iterator[list[subprocess.Popen]]:
    """Run commands side by side, each with its own variables and log; kill what is left in the end."""
    processes = []
    for i, (command, own) in enumerate(zip(commands, variables, strict=True)):
        environment = {name: value for name, value in ENVIRONMENT.items() if name not in LAUNCHED}
        environment |= {"PATH": os.environ["PATH"], **own}
        with Path(f"{log}.{i}").open("w") as file:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def said(log: Path, i: int = 0) -> str:
    return Path(f"{log}.{i}").read_text()


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def last_step(folder: Path) -> int:
    return torch.load(last(folder), weights_only=True, map_location="cpu")["global_step"]


def wait_for_a_checkpoint(folder: Path, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not last(folder).exists():
        assert process.poll() is None, said(log)[-4000:]
        assert time.monotonic() < deadline, said(log)[-4000:]
        time.sleep(0.1)


def statuses(processes: list[subprocess.Popen]) -> list[int]:
    return [process.wait(PATIENCE) for process in processes]


TWO_MACHINES = ("--trainer.num_nodes", "2", "--trainer.devices", "1", "--data.mini_batches", "2")


def torchrun_agents(arguments: list[str]) -> list[list[str]]:
    """The command of each machine."""
    port = str(free_port())
    return [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node)),
            *("--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port, "-m", "app", *arguments),
        ]
        for node in range(2)
    ]


def slurm_tasks(**more: str) -> list[dict[str, str]]:
    """The variables that srun gives to two tasks on two machines, as far as Lightning reads them."""
    job = {
        **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "lockstep", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"},
        **{"SLURM_NNODES": "2", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port()), **more},
    }
    return [{**job, "SLURM_PROCID": str(i), "SLURM_NODEID": str(i), "SLURM_LOCALID": "0"} for i in range(2)]


def test_a_slurm_job_is_saved_requeued_once_and_goes_on_exactly_as_under_torchrun(tmp_path, monkeypatch):
    asked = fake_scontrol(tmp_path, monkeypatch)
    steps = ("--trainer.max_steps", "8")
    agents = torchrun_agents(fit(tmp_path / "straight", *TWO_MACHINES, *steps))
    with started(agents, tmp_path / "straight.log", [{}, {}]) as processes:
        assert statuses(processes) == [0, 0], said(tmp_path / "straight.log")[-4000:]

    folder, log, sent = tmp_path / "parts", tmp_path / "parts.log", tmp_path / "sent"
    hold = {"class_path": "tests.hold.HoldAt", "init_args": {"step": 3, "until": str(sent)}}
    task = [*COMMAND, *fit(folder, *TWO_MACHINES, *steps, "--trainer.callbacks+", json.dumps(hold))]
    with started([task, task], log, slurm_tasks()) as tasks:
        wait_for_a_checkpoint(folder, tasks[0], log)
        tasks[1].send_signal(signal.SIGUSR1)
        sent.touch()
        assert statuses(tasks) == [0, 0], said(log)[-4000:]
    assert asked.read_text() == "requeue 4711\n"
    assert "SLURM job 4711 is queued again" in said(log)
    assert "Traceback" not in said(log) + said(log, 1)
    assert not (folder / "summary.json").exists()
    assert 2 <= last_step(folder) < 8
    assert not list(folder.glob("hpc_ckpt*"))  # Lightning's own requeue would leave one

    with started([task, task], log, slurm_tasks(SLURM_RESTART_COUNT="1")) as tasks:
        assert statuses(tasks) == [0, 0], said(log)[-4000:]
    assert asked.read_text() == "requeue 4711\n"
    assert last_step(folder) == last_step(tmp_path / "straight") == 8
    assert_equal_weights(last_weights(tmp_path / "straight"), last_weights(folder))


def child_of(pid: int) -> int:
    """The process that Lightning started beside it."""
    tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    found = [int(child) for task in tasks for child in task.read_text().split()]
    return next(child for child in found if b"fit" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "victim", "line", "arguments"),
    [
        (signal.SIGKILL, 0, None, ()),
        (signal.SIGKILL, 1, "--ckpt_path last", ()),
        (signal.SIGSTOP, 1, "process_group_timeout", ("--process_group_timeout", "60")),  # bounds the start, too
    ],
    ids=["first killed", "second killed", "second stopped"],
)
def test_a_process_that_dies_or_hangs_takes_the_run_down_in_a_line(number, victim, line, arguments, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    engine = ("--data.engine", "app.engine.transformers_engine.TransformersEngine")
    endless = ("--trainer.max_steps", "100000")
    command = [*COMMAND, *fit(folder, "--trainer.devices", "2", *endless, *engine, *arguments)]
    with started([command], log, [{}]) as (first,):
        wait_for_a_checkpoint(folder, first, log)
        second = child_of(first.pid)
        os.kill((first.pid, second)[victim], number)
        status = first.wait(PATIENCE)
        assert gone(second)
    assert status == (-number if victim == 0 else 1)
    assert "Traceback" not in said(log)
    if line is not None:
        (error,) = [text for text in said(log).splitlines() if text.startswith("error: ")]
        assert line in error
    assert last_step(folder) >= 1
