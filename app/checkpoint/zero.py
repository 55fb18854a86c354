"""Reading a DeepSpeed checkpoint folder, whatever its ZeRO stage and number of processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.checkpoint.state import TrainingState
from app.errors import LockstepError, first_line

TAG = "checkpoint"
"""Name that Lightning gives the inner folder."""
GROUPS = "lockstep_parameter_groups"
"""Key under which the names of the optimiser's parameters are saved: with several ZeRO-3 sub-groups to a group
nothing else in the folder names them."""
INEXACT = "sums are taken in another order from here on, so the run goes on to rounding, not bit for bit"
"""What a conversion cannot keep."""
ENGINE_KEYS = (
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "global_steps", "skipped_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    *("ds_config", "ds_version", "num_experts", "ds_autoep_layers"),
)
"""What DeepSpeed adds to Lightning's checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ZeroFiles:
    """The files of a DeepSpeed checkpoint folder."""

    model: tuple[Path, ...]
    """Model states: one file, or one of each rank under ZeRO-3."""
    optimizer: tuple[Path, ...]
    """Optimiser states, one file of each rank."""

    @classmethod
    def find(cls, folder: Path) -> ZeroFiles:
        """Find the files of `folder`.

        Raises:
            LockstepError: if DeepSpeed did not write it, or not to the end.
        """
        latest = folder / "latest"
        if not latest.is_file():
            raise LockstepError("is no whole DeepSpeed folder: it has no file `latest`, which is written last")
        inner = folder / latest.read_text().strip()
        files = cls(
            model=tuple(sorted(inner.glob("*mp_rank_00_model_states.pt"), key=_rank)),
            optimizer=tuple(sorted(inner.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank)),
        )
        if not files.model or not files.optimizer:
            raise LockstepError(f"lacks the model or optimiser states in {inner.name}")
        return files

    @property
    def present(self) -> tuple[Path, ...]:
        """All files that were found."""
        return (*self.model, *self.optimizer)

    def expected(self) -> list[Path]:
        """Return the files that should be there: the first one records how many processes wrote the folder.

        Raises:
            LockstepError: if the first one cannot be read.
        """
        size = load_mapped(self.model[0])["dp_world_size"]
        by_rank = [self.optimizer[0], *([self.model[0]] if "zero_pp_rank" in self.model[0].name else [])]
        return [
            path.with_name(path.name.replace(f"zero_pp_rank_{_rank(path)}_", f"zero_pp_rank_{rank}_"))
            for path in by_rank
            for rank in range(size)
        ]


class ZeroFolder:
    """A DeepSpeed checkpoint folder; its tensors stay on the disk until they are read.

    Layout as in deepspeed.checkpoint.ds_to_universal: each rank holds, for each group of parameters, one flat piece of
    the float32 weights and of each moment. Under ZeRO-1 and 2 a piece is a slice of all the group's parameters laid
    end to end; under ZeRO-3 each parameter is padded and cut for itself.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder.

        Raises:
            LockstepError: if it is not whole.
        """
        self.folder = folder
        files = ZeroFiles.find(folder)
        self._model = load_mapped(files.model[0])
        self._shards = [load_mapped(path)["optimizer_state_dict"] for path in files.optimizer]
        self.size: int = self._model["dp_world_size"]
        """Number of processes that wrote it."""
        self.bfloat16 = files.optimizer[0].name.startswith("bf16_")
        """Whether the model was in bfloat16."""
        shapes: list[Mapping[str, torch.Size]] = self._model["param_shapes"]
        self.stage = int(self._shards[0].get("zero_stage", 1))
        """ZeRO stage under which it was written."""
        self._shapes: dict[str, torch.Size] = {name: shape for group in shapes for name, shape in group.items()}
        pieces = self._padded_pieces(shapes) if self.stage == 3 else self._sliced_pieces()
        self._pieces: dict[str, list[tuple[int, int, int, int]]] = pieces

    @property
    def origin(self) -> str:
        """Who wrote it, in words."""
        return f"{self.size} process{'es' if self.size > 1 else ''} under ZeRO {self.stage}"

    def state(self) -> TrainingState:
        """Return what training needs to go on from here.

        Raises:
            LockstepError: if the folder does not record which parameters the optimiser's groups hold.
        """
        param_groups = [{key: value for key, value in group.items() if key != "params"} for group in self._param_groups]
        names = self._model.get(GROUPS) or [list(group) for group in self._model["param_shapes"]]
        if len(names) != len(param_groups):
            raise LockstepError(
                f"{self.folder}: {len(names)} lists of parameters for {len(param_groups)} groups of the optimiser; "
                f"only with as many processes and the ZeRO stage it was written with can training go on from it"
            )
        return TrainingState(
            lightning={key: value for key, value in self._model.items() if key not in (*ENGINE_KEYS, GROUPS)},
            names=names,
            param_groups=param_groups,
            step=max((state["step"] for state in self._states(0).values()), default=torch.tensor(0.0)),
            read=self.read,
        )

    def read(self, name: str, key: str) -> Tensor:
        """Return one parameter's whole `fp32`, `exp_avg` or `exp_avg_sq`."""
        parts = [self._flat(rank, group, key)[start:][:count] for rank, group, start, count in self._pieces[name]]
        return torch.cat(parts).view(self._shapes[name])

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters."""
        return list(self._shapes)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's persistent buffers."""
        return {name: self._model["module"][name] for name in self._model["buffer_names"]}

    def weights(self) -> dict[str, Tensor]:
        """Return the whole state_dict in float32: also frozen and tied parameters, and buffers."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        quiet = io.StringIO()  # it prints lines and progress bars
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(self.folder))
        return weights

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._base(0)["param_groups"]
        return groups

    def _base(self, rank: int) -> Mapping[str, Any]:
        """The state of the optimiser that DeepSpeed wraps."""
        shard = self._shards[rank]
        base: Mapping[str, Any] = shard["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        return base

    def _states(self, rank: int) -> Mapping[int, Any]:
        states: Mapping[int, Any] = self._base(rank)["state"]
        return states

    def _flat(self, rank: int, group: int, key: str) -> Tensor:
        shard = self._shards[rank]
        weights: list[Tensor] = shard["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]
        if key == "fp32":
            return weights[group]
        states = self._states(rank)
        flat: Tensor = states[group][key] if group in states else torch.zeros_like(weights[group])
        return flat

    def _sliced_pieces(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """ZeRO-1 and 2: (rank, group, start, count) of each parameter's pieces, as the folder lists them."""
        pieces: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in self._shapes}
        for rank, shard in enumerate(self._shards):
            for group, mapping in enumerate(shard["param_slice_mappings"]):
                for name, address in mapping.items():
                    pieces[name].append((rank, group, address.start, address.numel))
        return pieces

    def _padded_pieces(self, shapes: list[Mapping[str, torch.Size]]) -> dict[str, list[tuple[int, int, int, int]]]:
        """ZeRO-3: as above; every rank has ceil(numel / ranks) of a parameter, the last ones padding."""
        pieces: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in self._shapes}
        for group, parameters in enumerate(shapes):
            start = 0
            for name, shape in parameters.items():
                share = -(-shape.numel() // self.size)
                for rank in range(self.size):
                    count = max(0, min(share, shape.numel() - rank * share))
                    pieces[name].append((rank, group, start, count))
                start += share
        return pieces


def load_mapped(path: Path) -> dict[str, Any]:
    """Open a part of a DeepSpeed folder without reading its tensors.

    DeepSpeed keeps objects of its own in there, so unlike a checkpoint file it can run code when it is opened: use
    folders from people you trust.

    Raises:
        LockstepError: if it cannot be read, or DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise LockstepError("is a DeepSpeed folder, and deepspeed is not installed")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read as unpickling imports deepspeed; else it guesses
    try:
        part: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:
        raise LockstepError(f"has a part that cannot be read: {path.name} ({first_line(error)})") from error
    return part


def _rank(path: Path) -> int:
    """The rank in a file's name; 0 if it has none."""
    _, found, rest = path.name.partition("zero_pp_rank_")
    return int(rest.split("_")[0]) if found else 0
