"""The distance between two scorings of the same tokens."""

from __future__ import annotations

from torch import Tensor

from app.audit.types import Distance
from app.maths.divergence import LOG_RATIO_BOUND, kl_sampler_target_k3
from app.metrics.core import MAX_K3


def distance(engine: Tensor, trainer: Tensor) -> Distance:
    """Compare log-probabilities token by token, in float64; l = trainer - engine.

    A token that is not finite on both sides (missing, or of probability 0) is left out and not counted in `tokens`.
    k3 (Schulman 2020, "Approximating KL Divergence") estimates KL(engine || trainer), as the diagnostic k3_kl does.
    Without a token to compare every field is 0.

    Args:
        engine: [N], nats.
        trainer: [N], nats.

    Raises:
        ValueError: if the shapes differ.
    """
    if engine.shape != trainer.shape:
        raise ValueError(f"engine {tuple(engine.shape)} and trainer {tuple(trainer.shape)} must score the same tokens")
    engine, trainer = engine.double(), trainer.double()
    both = engine.isfinite() & trainer.isfinite()
    if not both.any():
        return Distance(mean_abs=0.0, max_abs=0.0, rms=0.0, k3=0.0, tokens=0)
    log_ratio = trainer[both] - engine[both]
    k3 = kl_sampler_target_k3(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).clamp(max=MAX_K3)
    return Distance(
        mean_abs=float(log_ratio.abs().mean()),
        max_abs=float(log_ratio.abs().max()),
        rms=float(log_ratio.square().mean().sqrt()),
        k3=float(k3.mean()),
        tokens=int(both.sum()),
    )
