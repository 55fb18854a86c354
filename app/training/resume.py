"""What a checkpoint carries of a run besides Lightning's own part, so that it goes on exactly where it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from app.errors import LockstepError
from app.guards.nonfinite import NonFiniteGuard
from app.guards.run_control import RunControl
from app.training.meters import StepMeters
from app.world import World

FORMAT = 2
"""Of what is saved here. 1, in which it was not named: rows of prompt and completion, decisions under several keys."""


class StatefulLoader(Protocol):
    """A loader that knows its place."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place."""


class Continuation:
    """Saves and restores the statistics that are not logged yet, what was decided, and the place in the data.

    Gradients are not saved. A checkpoint from inside an accumulation window therefore goes on at its start: the
    counters of Lightning's loop are set back here, and the statistics are those from before the window; the loader
    sets itself back.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._window_start: dict[str, Tensor] = {}
        self._saved: dict[str, Any] = {}

    def window_starts(self, meters: StepMeters) -> None:
        """Remember the statistics from before the micro-batches of an optimiser step."""
        self._window_start = meters.local_state()

    def save(
        self,
        checkpoint: dict[str, Any],
        meters: StepMeters,
        guard: NonFiniteGuard,
        run_control: RunControl,
        accumulate: int,
    ) -> None:
        """Add to Lightning's checkpoint. All ranks must call it together.

        Args:
            checkpoint: the checkpoint so far, with the state of the loops.
            meters: the statistics of each rank; all of them are saved.
            guard: the guard whose count of skipped steps is saved.
            run_control: the control whose watchers are saved.
            accumulate: micro-batches of an optimiser step.
        """
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]
        inside = progress["current"]["ready"] % accumulate
        for counters in (progress["current"], progress["total"]):
            counters.update({name: count - inside for name, count in counters.items()})
        if inside:
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # added again when the loop restarts
        state = self._window_start if inside else meters.local_state()
        checkpoint["lockstep"] = {
            "format": FORMAT,
            "run_control": run_control.state_dict(),
            "non_finite": guard.state_dict(),
            "meters": self.world.gather({name: vector.cpu() for name, vector in state.items()}),
        }

    def load(self, checkpoint: Mapping[str, Any], run_control: RunControl) -> None:
        """Take in a checkpoint; the parts that are needed later are kept for `restore`.

        Raises:
            LockstepError: if the checkpoint would go on inside a run, but is of another version.
        """
        fit_loop = checkpoint.get("loops", {}).get("fit_loop")
        if fit_loop is None:
            return
        saved = checkpoint.get("lockstep", {})
        if not saved and checkpoint.get("global_step") == 0:
            return  # saved before any step was trained: there is nothing to go on with
        if saved.get("format") != FORMAT:
            raise LockstepError(
                f"--ckpt_path: the checkpoint was written by another version of Lockstep (format "
                f"{saved.get('format', 1)}, this one goes on from {FORMAT}); go on with that version, or export it "
                f"and start from the weights (model.model_name_or_path)"
            )
        run_control.load_state_dict(saved["run_control"])
        self._saved = {**saved, "loader": fit_loop["state_dict"].get("combined_loader", [])}

    def restore(self, loader: StatefulLoader, meters: StepMeters, guard: NonFiniteGuard) -> None:
        """Go on from the checkpoint taken in, if there is one; on other ranks the first one takes all statistics."""
        saved, self._saved = self._saved, {}
        # Lightning leaves the loader as it is if it was made before the checkpoint was read (a finite number of
        # epochs asks for its length) or if the epoch was complete.
        for state in saved.get("loader", []):
            loader.load_state_dict(state)
        for state in self.world.own_of(saved.get("meters", [])):
            meters.load_state(state)
        if saved:
            guard.load_state_dict(saved["non_finite"])
