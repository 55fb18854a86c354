"""What training needs to go on, in a form that belongs to no strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.errors import LockstepError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, besides the step."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A checkpoint's weights and optimiser states by parameter name, read from the disk when they are needed."""

    lightning: dict[str, Any]
    """The rest of Lightning's checkpoint: loops, schedules, callbacks, data."""
    names: Sequence[Sequence[str]]
    """Names of the trained parameters, by group of the optimiser, in its order."""
    param_groups: list[dict[str, Any]]
    """Settings of the optimiser's groups (learning rate, weight decay, ...), without the parameters."""
    step: Tensor
    """Steps the optimiser has done."""
    read: Callable[[str, str], Tensor]
    """From a parameter's name and `fp32`, `exp_avg` or `exp_avg_sq` to the whole tensor."""

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state_dict of a torch AdamW over these groups."""
        order = [name for group in self.names for name in group]
        state = {
            i: {"step": self.step.clone(), **{key: self.read(name, key).clone() for key in MOMENTS}}
            for i, name in enumerate(order)
        }
        groups, first = [], 0
        for settings, names in zip(self.param_groups, self.names, strict=True):
            groups.append({**settings, "params": list(range(first, first + len(names)))})
            first += len(names)
        return {"state": state, "param_groups": groups}


def read_file(path: Path, names: Sequence[Sequence[str]]) -> TrainingState:
    """Open a checkpoint file, as a single process or DDP writes it; its tensors stay on the disk.

    Args:
        path: the checkpoint file.
        names: which parameters each optimiser group holds; the file only numbers them.

    Raises:
        LockstepError: if its optimiser has other groups or its model other parameters.
    """
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    weights: Mapping[str, Tensor] = checkpoint["state_dict"]
    optimizer = checkpoint["optimizer_states"][0]
    sizes = [len(group["params"]) for group in optimizer["param_groups"]]
    order = [name for group in names for name in group]
    unknown = [name for name in order if name not in weights]
    if unknown or sizes != [len(group) for group in names]:
        what = f"it has no {unknown[0]}" if unknown else f"its optimiser has groups of {sizes} parameters"
        raise LockstepError(f"--ckpt_path: {path} is of another model: {what}")
    numbers = {name: i for i, name in enumerate(order)}
    states: Mapping[int, Mapping[str, Tensor]] = optimizer["state"]

    def read(name: str, key: str) -> Tensor:
        if key == "fp32":
            return weights[name].float()
        return states.get(numbers[name], {}).get(key, torch.zeros_like(weights[name])).float()

    return TrainingState(
        lightning={key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")},
        names=names,
        param_groups=[{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]],
        step=max((state["step"] for state in states.values()), default=torch.tensor(0.0)),
        read=read,
    )
