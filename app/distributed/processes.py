"""Processes that train together: they end together, wait a bounded time for each other, and share a folder."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from app.errors import LockstepError, causes, first_line
from app.world import World

LAUNCHER = "LOCKSTEP_LAUNCHER_PID"
"""Environment variable by which a process started by Lightning knows the one that started it."""

PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h: the signal this process gets when its parent ends."""

COLLECTIVE = re.compile(r"gloo.transport|pair closure|NCCL|TCPStore", re.IGNORECASE)
"""In the message of an error raised by communication between processes."""

SILENT = re.compile(r"time(d )?out", re.IGNORECASE)
GONE = re.compile(r"closed by|reset by|broken pipe|pair closure|connection|abort|remote (process|error)", re.IGNORECASE)


def end_with_launcher() -> None:
    """Let this process be killed when the one that started it ends, if it is one of those that Lightning starts.

    Left alone, such a process would notice at its next collective only, after sampling a whole rollout, and not at all
    while it is stopped. Only Linux's kernel does this; elsewhere the next collective must do.
    """
    launcher = os.environ.get(LAUNCHER)
    started_by_us = int(os.environ.get("LOCAL_RANK", 0)) > 0 and "TORCHELASTIC_RUN_ID" not in os.environ
    if launcher is None or not started_by_us:
        os.environ[LAUNCHER] = str(os.getpid())
        return
    if sys.platform == "linux" and launcher == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher != str(os.getppid()):  # it ended while this one started
        os.kill(os.getpid(), signal.SIGKILL)


class WatchedLauncher(_SubprocessScriptLauncher):
    """Starts the other processes of a machine as Lightning does, and ends with them.

    Lightning's own watch kills this process as soon as another has failed: before it could report why it ends itself.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, if nobody else does, and call `function`."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=end_with_children, args=(self.procs,), daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def watch_launched(strategy: Strategy) -> None:
    """Replace Lightning's launcher of several processes, if `strategy` has it, by one that ends with a line."""
    launcher = strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        strategy._launcher = WatchedLauncher(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)


def end_with_children(children: Sequence[subprocess.Popen[Any]], patience: float = 5.0, every: float = 0.5) -> None:
    """Wait until all `children` have ended well; if one has not, end the others and this process with a line.

    Args:
        children: started by this process, local rank 1 first.
        patience: seconds that this process has to report an error of its own, which is more precise.
        every: seconds between two looks.
    """
    while None in (statuses := [child.poll() for child in children]) and not any(statuses):
        time.sleep(every)
    failed = [(rank, status) for rank, status in enumerate(statuses, start=1) if status]
    if not failed:
        return
    time.sleep(patience)
    for child in children:
        child.kill()
    rank, status = failed[0]
    if status in (-signal.SIGINT, 128 + signal.SIGINT):  # Ctrl-C reaches all of them
        os.write(2, b"\nstopped by SIGINT; go on with --ckpt_path last\n")
        os._exit(128 + signal.SIGINT)
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    line = f"error: the process of local rank {rank} {how}, see its own message; go on with --ckpt_path last"
    os.write(2, f"\n{line}\n".encode())
    os._exit(1)  # the main thread may be sampling for minutes, or wait for the lost process in a collective


def bound_waiting(strategy: Strategy, seconds: int) -> None:
    """Let processes wait at most `seconds` for each other in a collective, under a strategy that has several."""
    if hasattr(strategy, "_timeout"):  # read when the process group is made; the registry's names take no arguments
        strategy._timeout = timedelta(seconds=seconds)


def lost_peer(error: BaseException) -> str | None:
    """Return one line if `error`, or one it came from, means that another process has ended or hangs; else None."""
    for link in causes(error):
        text = first_line(link) if isinstance(link, Exception) else ""
        if not isinstance(link, dist.DistError) and not (isinstance(link, RuntimeError) and COLLECTIVE.search(text)):
            continue
        quoted = text.split("GLHF")[0].split(" This is typically caused")[0].split("] ", 1)[-1].strip()
        if SILENT.search(text):
            return (
                f"another process hangs, or is slower than the process_group_timeout ({quoted}); look at its own "
                f"messages, then go on with --ckpt_path last"
            )
        if GONE.search(text):
            return f"another process has ended ({quoted}); see its own message, then go on with --ckpt_path last"
    return None


def check_shared(folder: Path, world: World, patience: float = 10.0) -> None:
    """Check that all ranks see the same `folder`, by a file that rank 0 makes there. All ranks must call it together.

    Args:
        folder: where checkpoints are written; made if missing.
        world: the processes.
        patience: seconds until a network file system must show the new file.

    Raises:
        LockstepError: on every rank, if some rank does not see it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".seen-by-all-{world.gather(uuid.uuid4().hex)[0]}"  # new, so that no answer about it is cached
    if world.rank == 0:
        mark.touch()
    world.gather(None)
    deadline = time.monotonic() + patience
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(world.gather(seen)) if not sees]
    if world.rank == 0:
        mark.unlink()
    if blind:
        raise LockstepError(
            f"trainer.default_root_dir={folder}: processes {blind} do not see the files of process 0 there; all "
            f"machines need one shared folder, or a checkpoint cannot be put together again"
        )
