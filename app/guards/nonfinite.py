"""A loss or gradient that is not finite: the optimiser step is skipped, its rows are kept, the run ends in time.

One step with a NaN gradient makes every weight NaN. So all ranks decide together, before the optimiser moves anything,
and leave the step out. What a person needs to find the cause is written down: the rows, and what the loss made of them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.errors import LockstepError
from app.guards.row_file import Reason, RecordedRow, RowFileHeader, recorded_rows, write_rows
from app.types import TrainBatch
from app.world import World

FOLDER = "non_finite"
"""Where the files go, in the run folder."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteConfig:
    """What happens when the loss or the gradient of an optimiser step is not finite. The step is always skipped."""

    max_consecutive_steps: int = 5
    """The run ends at so many skipped steps in a row: the weights no longer change, so nothing would fix itself."""
    max_rows: int = 64
    """Most rows that each process writes to `non_finite/` in the run folder for a skipped step."""

    def __post_init__(self) -> None:
        for name in ("max_consecutive_steps", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.non_finite.{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """One that was watched; everything stays on its device."""

    batch: TrainBatch
    """The rows of the micro-batch."""
    new_logprobs: Tensor
    """[B, T] nats, without gradient: what the policy gave them."""
    finite: Tensor
    """Scalar bool: whether the loss of the micro-batch is finite."""


class NonFiniteGuard:
    """Decides, for all ranks together, whether an optimiser step must be skipped; keeps its rows; ends a hopeless run.

    It costs no device sync per micro-batch, and per optimiser step one sum of two numbers over the ranks. The device
    copies of the step's rows stay alive until the step is closed.
    """

    def __init__(
        self,
        config: NonFiniteConfig,
        folder: Path,
        world: World,
        settings: Callable[[], Mapping[str, Any]],
        decode: Callable[[Sequence[int]], str] | None = None,
        replay: str = "python -m app replay --config CONFIG --ckpt_path last",
    ) -> None:
        """Start with nothing seen.

        Args:
            config: limits.
            folder: of the run.
            world: this process among its peers.
            settings: returns what the loss depends on now, for the files (see `GRPOModule.loss_settings`).
            decode: token ids to text, for the files; None: they hold ids only.
            replay: the command that replays rows, but for the file, for messages.
        """
        self.config = config
        self.folder = folder / FOLDER
        self.world = world
        self.settings = settings
        self.decode = decode
        self.replay = replay
        self.consecutive = 0
        """Skipped steps since the last one that was not."""
        self.skipped = 0
        """Skipped steps of the run."""
        self._watched: list[_MicroBatch] = []

    def watch(self, batch: TrainBatch, new_logprobs: Tensor, loss: Tensor) -> None:
        """Take note of a micro-batch of the optimiser step under way.

        Args:
            batch: its rows.
            new_logprobs: [B, T] nats.
            loss: scalar.
        """
        finite = loss.detach().isfinite()
        self._watched.append(_MicroBatch(batch=batch, new_logprobs=new_logprobs.detach(), finite=finite))

    def close_step(self, gradient_norm: Tensor | float | None, step: int) -> bool:
        """Return whether the step must be skipped, the same on every rank. All ranks must call it together.

        Args:
            gradient_norm: of the step, before clipping; None: not known, the losses alone decide.
            step: number of the optimiser step, from 1.

        Raises:
            LockstepError: on every rank, after `max_consecutive_steps` skipped steps in a row.
        """
        watched, self._watched = self._watched, []
        losses = torch.stack([~micro_batch.finite for micro_batch in watched]).sum()
        gradient = torch.as_tensor(0.0 if gradient_norm is None else gradient_norm, device=losses.device)
        flags = torch.stack([losses, (~gradient.isfinite()).to(losses)])
        bad_losses, bad_gradients = self.world.sum(flags).tolist()
        if not bad_losses and not bad_gradients:
            self.consecutive = 0
            return False
        self.consecutive += 1
        self.skipped += 1
        reason: Reason = "loss" if bad_losses else "gradient"
        norm = None if gradient_norm is None else float(gradient_norm)
        self._write(watched, reason, norm, step)
        if self.consecutive >= self.config.max_consecutive_steps:
            raise LockstepError(
                f"{self.consecutive} optimiser steps in a row had a loss or gradient that is not finite "
                f"(model.non_finite.max_consecutive_steps); their rows are in {self.folder}: {self.replay} --rows "
                f"FILE. Usual causes: model.optim.learning_rate too high, no trainer.gradient_clip_val, float16 in "
                f"model.dtype or trainer.precision"
            )
        return True

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must carry, the same on every rank."""
        return {"consecutive": self.consecutive, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from a checkpoint."""
        self.consecutive, self.skipped = state["consecutive"], state["skipped"]

    def _write(self, watched: Sequence[_MicroBatch], reason: Reason, gradient_norm: float | None, step: int) -> None:
        """Write this rank's suspects and say so; no rank holds others up, and a full disk stops nothing."""
        said = f"optimiser step {step}: the {reason} is not finite, all ranks skip it ({self.consecutive} in a row)"
        rows = self._suspects(watched, reason)
        if not rows:
            return  # the fault is in another rank's rows, and that rank says so
        first = watched[0].batch
        header = RowFileHeader(
            step=step,
            rank=self.world.rank,
            reason=reason,
            gradient_norm=gradient_norm,
            correctable=first.correctable,
            totals=first.totals,
            rows_on_rank=sum(len(part.batch.lengths) for part in watched),
            settings=self.settings(),
        )
        path = self.folder / f"step={step}-rank={self.world.rank}.jsonl"
        try:
            write_rows(path, header, rows)
        except OSError as error:
            warnings.warn(f"{said}; its rows could not be written to {path}: {error}", stacklevel=2)
            return
        warnings.warn(
            f"{said}; {len(rows)} rows are in {path}: {self.replay} --rows {path}",
            stacklevel=2,
        )

    def _suspects(self, watched: Sequence[_MicroBatch], reason: Reason) -> list[RecordedRow]:
        """Rows with a value that is not finite, else all of the micro-batches in question, the oddest first."""
        parts = [part for part in watched if reason == "gradient" or not part.finite]
        scores = [suspicion(part.batch, part.new_logprobs).tolist() for part in parts]
        places = [(score, i, row) for i, column in enumerate(scores) for row, score in enumerate(column)]
        broken = [place for place in places if place[0] == float("inf")]
        ordered = sorted(broken or places, key=lambda place: -place[0])[: self.config.max_rows]
        found: dict[tuple[int, int], RecordedRow] = {}
        for index, part in enumerate(parts):
            rows = [row for _, i, row in ordered if i == index]
            for row, recorded in zip(rows, recorded_rows(part.batch, part.new_logprobs, rows), strict=True):
                found[index, row] = recorded
        return [self._with_text(found[i, row]) for _, i, row in ordered]

    def _with_text(self, recorded: RecordedRow) -> RecordedRow:
        if self.decode is None:
            return recorded
        row = recorded.row
        return dataclasses.replace(
            recorded, prompt=self.decode(row.prompt_ids), completion=self.decode(row.completion_ids)
        )


def replay_command(trainer: Any) -> str:
    """Return the command that replays rows of the run, but for the file."""
    saved = Path(trainer.log_dir or trainer.default_root_dir) / "config.yaml"  # by Lightning's SaveConfigCallback
    return f"python -m app replay --config {saved} --ckpt_path last"


def suspicion(batch: TrainBatch, new_logprobs: Tensor) -> Tensor:
    """How likely a row is to have spoilt its step: inf where a number of it is not finite, else its largest difference.

    The difference is |new - old| of a token, or |new - rollout| without old: a ratio that overflows begins there. A NaN
    among the rollout's log-probabilities is no fault: that token's value is missing.

    Args:
        batch: the rows.
        new_logprobs: [B, T] nats.

    Returns:
        [B] float32.
    """
    rollout = batch.rollout_logprobs.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    old = torch.where(batch.rollout_logprobs.isnan(), new_logprobs, batch.rollout_logprobs)
    difference = (new_logprobs - (old if batch.old_logprobs is None else batch.old_logprobs)).abs()
    values = [new_logprobs, rollout, batch.old_logprobs, batch.ref_logprobs]
    broken = torch.stack([~value.isfinite() for value in values if value is not None]).any(0)
    worst = torch.where(batch.mask, difference.masked_fill(broken, torch.inf), 0).amax(1)
    return worst.masked_fill(~batch.advantages.isfinite(), torch.inf).float()
