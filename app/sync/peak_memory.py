"""The highest memory use of this process so far."""

from __future__ import annotations

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
"""Where Linux reports it. (`getrusage` would begin at the parent's peak in a process that was spawned.)"""


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes ever held at once: allocated by torch on a GPU, resident in memory for a CPU.

    The mark is only read, never reset: others may be watching it. None: the system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or not STATUS.exists():
        return None
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024
