"""What a run did: reward before and after, seconds by phase, where the files are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from app.versions import versions

REWARD = "rollout/reward_mean"


class RunSummary(Callback):
    """Keeps the values from before training and the latest ones, and writes `summary.json` after the last step.

    The training reward is always among them; `before` holds that of the first step. The state is in the checkpoint,
    so that a resumed run reports the same "before".
    """

    def __init__(self) -> None:
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take in what the last step logged."""
        self._take(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take in what the very last step logged."""
        self._take(trainer)

    def _take(self, trainer: Trainer) -> None:
        if (reward := trainer.callback_metrics.get(REWARD)) is not None:
            self.before.setdefault(REWARD, float(reward))
            self.after[REWARD] = float(reward)

    def state_dict(self) -> dict[str, Any]:
        """The values from before training."""
        return {"before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the values from before training out of a checkpoint."""
        self.before = dict(state_dict["before"])

    def write(
        self,
        folder: Path,
        *,
        steps: int,
        seed: int | None,
        seconds: Mapping[str, float],
        syncs: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> Path:
        """Write `summary.json` into `folder` and return its path.

        Args:
            folder: the run folder.
            steps: optimiser steps done.
            seed: of the run.
            seconds: by phase, of this process.
            syncs: of the weights.
            settings: what a preset or a loss type stood for, with every value.
        """
        summary = {
            "before": self.before,
            "after": self.after,
            "steps": steps,
            "seed": seed,
            "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
            "weight_syncs": dict(syncs),
            "settings": dict(settings),
            "versions": versions(),
            "git_commit": git_commit(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        return path


def git_commit() -> str | None:
    """Return the commit of the code, `-dirty` if it was changed; None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:  # no git on this machine
        return None
    return answer.stdout.strip() or None


def before_after_table(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return the values as an aligned text table."""
    names = sorted(set(before) | set(after))
    width = max(map(len, names), default=0)

    def value(values: Mapping[str, float], name: str) -> str:
        return f"{values[name]:8.3f}" if name in values else "       –"

    rows = [f"{'':{width}}    before     after"]
    rows += [f"{name:{width}}  {value(before, name)}  {value(after, name)}" for name in names]
    return "\n".join(rows)
