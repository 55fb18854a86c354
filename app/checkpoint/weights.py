"""A checkpoint's weights alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from app.checkpoint.zero import ZeroFolder


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the state_dict in a checkpoint file, or in a DeepSpeed folder whatever its ZeRO stage (in float32).

    Raises:
        LockstepError: if the folder is not whole.
    """
    if path.is_dir():
        return ZeroFolder(path).weights()
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    return weights
