"""Lost processes are named in a line, nothing outlives its launcher, a folder that is not shared is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from app.distributed.processes import LAUNCHER, bound_waiting, check_shared, lost_peer
from app.errors import LockstepError

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"
RESET = f"{PAIR} Read error [127.0.0.1]:6809: Connection reset by peer. This is typically caused by a remote worker "
RESET += "hanging or bugs in the application. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
UNBOUND = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78]"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(RESET), ["ended (Read error [127.0.0.1]:6809: Connection reset by peer.)", "--ckpt_path last"]),
        (RuntimeError(f"{PAIR} Connection closed by peer [127.0.0.1]:5000"), ["has ended"]),
        (RuntimeError("Application timeout caused pair closure"), ["hangs", "process_group_timeout"]),
        (
            RuntimeError(f"{UNBOUND} Timed out waiting 4000ms for recv operation to complete"),
            ["hangs", "process_group_timeout", "(Timed out waiting 4000ms for recv operation to complete)"],
        ),
        (dist.DistStoreError("wait timeout after 300000ms, keys: /worker/1"), ["hangs"]),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), ["has ended"]),
    ],
)
def test_errors_of_communication_become_one_line(error, words):
    line = lost_peer(error)
    assert line is not None
    assert "\n" not in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a reward server timed out"),
        ConnectionResetError("Connection reset by peer"),  # of some other connection
        dist.DistBackendError("NCCL error: out of memory"),
        ValueError("gloo/transport: connection closed by peer"),
    ],
)
def test_other_errors_keep_their_traceback(error):
    assert lost_peer(error) is None


def test_what_a_lost_process_led_to_is_traced_back():
    in_teardown = KeyError("barrier")
    in_teardown.__context__ = RuntimeError(RESET)
    assert "has ended" in str(lost_peer(in_teardown))


def test_the_time_out_reaches_strategies_with_several_processes():
    strategy = DDPStrategy()
    bound_waiting(strategy, 90)
    assert strategy._timeout == timedelta(seconds=90)  # what it hands to init_process_group
    bound_waiting(SingleDeviceStrategy(), 90)


@pytest.mark.skipif(sys.platform != "linux", reason="by Linux's prctl")
def test_a_process_that_lightning_started_does_not_outlive_its_launcher():
    child = (
        "import time, os; from app.distributed.processes import end_with_launcher as e; e(); "
        "print('ready', os.getpid())"
    )
    launcher = (
        f"import os, subprocess, sys; os.environ.update({LAUNCHER}=str(os.getpid()), LOCAL_RANK='1');"
        f"subprocess.run([sys.executable, '-uc', {child + '; time.sleep(3600)'!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "ready"
    os.kill(int(pid), signal.SIGSTOP)  # nor while it is stopped
    process.kill()
    process.wait()
    assert gone(int(pid))


def gone(pid: int, patience: float = 120.0) -> bool:
    """Whether the process ends; one whose end nobody has asked about yet has ended. Left alone, none here would."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def ending(*children: str) -> tuple[int, str]:
    """Status and last line of a process that watches children which run this shell code, as long as it must."""
    code = (
        "import subprocess; from app.distributed.processes import end_with_children; "
        f"children = [subprocess.Popen(['sh', '-c', code]) for code in {list(children)!r}]; "
        "import threading; watch = threading.Thread(target=end_with_children, args=(children, 0.5, 0.1), daemon=True); "
        "watch.start(); watch.join(); print([child.poll() for child in children])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


def test_a_launcher_ends_with_the_first_child_that_fails_and_says_how():
    code, line = ending("exec sleep 3600", "kill -9 $$")
    assert code == 1
    assert line.startswith("error: the process of local rank 2 was ended by SIGKILL")
    code, line = ending("exit 3")
    assert code == 1
    assert "local rank 1 ended with status 3" in line


def test_a_launcher_does_not_mind_children_that_end_well():
    assert ending("exit 0", "exit 0") == (0, "[0, 0]")


class Threads:
    """Two ranks as threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.values: list = [None, None]

    def rank(self, rank: int):
        outer = self

        class Rank:
            def __init__(self) -> None:
                self.rank = rank

            def gather(self, value):
                outer.values[rank] = value
                outer.barrier.wait(300)
                values = list(outer.values)
                outer.barrier.wait(300)
                return values

        return Rank()


def refusals(folders: list[Path]) -> list[str | None]:
    """What each of two ranks says about its folder."""
    world, said = Threads(), [None, None]

    def check(rank: int) -> None:
        try:
            check_shared(folders[rank], world.rank(rank), patience=0.5)
        except LockstepError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_a_shared_folder_passes_and_nothing_is_left_in_it(tmp_path):
    assert refusals([tmp_path / "runs", tmp_path / "runs"]) == [None, None]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_of_each_machines_own_is_refused_on_all(tmp_path):
    first, second = refusals([tmp_path / "a", tmp_path / "b"])
    assert "processes [1]" in str(first)
    assert "processes [1]" in str(second)
    assert "shared folder" in str(first)


def test_a_process_whose_launcher_has_ended_meanwhile_ends_too():
    """Killed while its child was still importing: there was nobody to be told of."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = "from app.distributed.processes import end_with_launcher; end_with_launcher(); print('alive')"
    environment = {**os.environ, "LOCAL_RANK": "1", LAUNCHER: str(gone.pid)}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    elastic = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "TORCHELASTIC_RUN_ID": "1"}, capture_output=True
    )
    assert elastic.stdout == b"alive\n"
