"""A checkpoint's weights into a module that does not train: for export, audit and replay."""

from __future__ import annotations

from pathlib import Path

from app.checkpoint.weights import read_weights
from app.policy.loading import check_same_model
from app.training.module import GRPOModule


def load_checkpoint_weights(module: GRPOModule, checkpoint: Path) -> None:
    """Load the policy of a checkpoint, a file or a DeepSpeed folder, into a module that was set up.

    Raises:
        LockstepError: if the checkpoint is of another model.
    """
    state = read_weights(checkpoint)
    check_same_model(module, state)
    module.load_state_dict(state)


def set_up(module: GRPOModule, checkpoint: Path | None) -> None:
    """Load the policy of a checkpoint; None: of the model that training starts from.

    Raises:
        LockstepError: if the checkpoint is of another model.
    """
    module.setup("replay")
    if checkpoint is not None:
        load_checkpoint_weights(module, checkpoint)
