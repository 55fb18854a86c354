"""Each side against itself: how much changes that should not matter move its log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from app.audit.attribution.factors import Pipeline
from app.audit.measure import Measurements, cost
from app.audit.sides.condition import Condition, EngineCondition, TrainerCondition
from app.audit.types import Distance, NoiseSource
from app.policy.loading import Dtype

ROUNDING: dict[Dtype, float] = {"float32": 5e-5, "float16": 1e-2, "bfloat16": 0.1}
"""Largest mean |difference| that rounding in a dtype explains, of one side against itself, nats. Measured on
SmolLM2-135M: up to 6e-6, 4.4e-3, and 4.4e-2 between two attention kernels; the bounds are two to ten times that."""


def engine_changes(requests: int) -> dict[str, EngineCondition]:
    """Return the changes on the engine's side by name, for so many requests."""
    return {
        "the same tokens decoded again": EngineCondition(),
        "half the batch": EngineCondition(batch_size=max(1, requests // 2)),
        "no prefix cache": EngineCondition(read_prefix_cache=False),
    }


def trainer_changes(pipeline: Pipeline, tokens: int) -> dict[str, TrainerCondition]:
    """Return the changes on the trainer's side by name, for so many tokens in all rows."""
    other = pipeline.other_attention
    changes = {
        "one row at a time": TrainerCondition(arrangement="single_rows"),
        "other micro-batches": TrainerCondition(micro_batch_tokens=max(1, tokens // 3)),
        "padded on the left": TrainerCondition(arrangement="left_padded"),
        f"attention kernel {other}": TrainerCondition(attention=other),
    }
    if pipeline.trainer_dtype != "float32":
        changes["in float32"] = TrainerCondition(dtype="float32")
    return changes


def expected_cost(pipeline: Pipeline, requests: int) -> float:
    """Return the cost of `measure_noise`, for the progress bar."""
    engine = sum(cost(Condition(engine=condition)) for condition in engine_changes(requests).values())
    return engine + sum(cost(Condition(trainer=condition)) for condition in trainer_changes(pipeline, 3).values())


def measure_noise(measured: Measurements, pipeline: Pipeline, requests: int, tokens: int) -> Iterator[NoiseSource]:
    """Yield the noise of both sides.

    Three kinds do not count for the floor: a distance above the side's `ROUNDING` is a finding and not noise; a change
    of precision is a choice; and where the two sides compute in different dtypes, the distance between attention
    kernels is part of what must be explained.
    """
    for name, engine in engine_changes(requests).items():
        with measured.progress.stage(f"engine against itself: {name}", cost(Condition(engine=engine))):
            found = measured.engine_noise(engine)
        yield NoiseSource(side="engine", name=name, distance=found, in_floor=_rounding(found, pipeline.engine_dtype))
    for name, trainer in trainer_changes(pipeline, tokens).items():
        with measured.progress.stage(f"trainer against itself: {name}", cost(Condition(trainer=trainer))):
            found = measured.trainer_noise(trainer)
        alike = trainer.attention is None or pipeline.engine_dtype == pipeline.trainer_dtype
        counts = trainer.dtype is None and alike and _rounding(found, pipeline.trainer_dtype)
        yield NoiseSource(side="trainer", name=name, distance=found, in_floor=counts)


def _rounding(found: Distance, dtype: Dtype) -> bool:
    return found.mean_abs <= ROUNDING[dtype]
