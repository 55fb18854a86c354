"""DeepSpeed's universal checkpoint: every parameter whole, for any number of processes and any ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import torch

from app.checkpoint.state import MOMENTS, TrainingState

INNER = "universal"
"""The tag under which it is written."""


def write_universal(state: TrainingState, folder: Path) -> None:
    """Write the state so that DeepSpeed's engine loads it with `checkpoint.load_universal`.

    The layout is that of deepspeed.checkpoint.ds_to_universal, with two differences: it is written parameter by
    parameter, so that the memory for one of them is enough; and it serves all stages, while ds_to_universal writes
    what the stage it read would want (2 -> 3 fails there).

    Raises:
        OSError, RuntimeError: if it cannot be written.
    """
    import deepspeed

    inner = folder / INNER
    for name in (name for group in state.names for name in group):
        own = inner / "zero" / name
        own.mkdir(parents=True)
        torch.save(state.step, own / "step.pt")
        for key in ("fp32", *MOMENTS):
            torch.save({"param": state.read(name, key)}, own / f"{key}.pt")
    optimizer = {
        "ds_version": deepspeed.__version__,
        "param_groups": state.param_groups,
        "optimizer_state_dict": {"state": {0: {"step": state.step}}, "param_groups": state.param_groups},  # for ZeRO-3
    }
    steps = int(state.lightning["global_step"])
    engine = {"module": {}, "dp_world_size": 1, "mp_world_size": 1, "global_steps": steps, "skipped_steps": 0}
    torch.save(optimizer, inner / "zero" / "optimizer_state.pt")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO-1 and 2; ZeRO-3
        torch.save(engine, inner / name)
