"""A learning rate lowered, and raised again, while its schedule goes on."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR


def scale_learning_rate(schedule: LambdaLR, scale: float) -> None:
    """Make every rate `scale` times what the schedule has for it, from the next optimiser step on.

    It goes by the rates that the schedule started with (`initial_lr`), so a second call replaces the first, and the
    rates are those of `LambdaLR` bit for bit.

    Args:
        schedule: as `build_schedule` makes it.
        scale: above 0; 1: as scheduled.
    """
    schedule.base_lrs = [group["initial_lr"] * scale for group in schedule.optimizer.param_groups]
    for group, rate, share in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * share(schedule.last_epoch)
