"""Distances between engine and trainer on the audited tokens under any condition, each measured once."""

from __future__ import annotations

from torch import Tensor

from app.audit.attribution.distance import distance
from app.audit.progress import Progress
from app.audit.sides.condition import Condition, EngineCondition, TrainerCondition
from app.audit.sides.engine_side import EngineSide, token_scores
from app.audit.sides.trainer_side import TrainerSide
from app.audit.types import Distance, TokenScores

DECODE_COST, START_COST, SCORE_COST = 3.0, 3.0, 1.0
"""Costs of a stage, relative to one scoring by the trainer."""


class Measurements:
    """The two sides of the audit, and the distance between them."""

    def __init__(self, sampled: TokenScores, engine: EngineSide, trainer: TrainerSide, progress: Progress) -> None:
        """Compare the two sides; `sampled` has the log-probabilities that came with the samples."""
        self.sampled = sampled
        self.engine = engine
        self.trainer = trainer
        self.progress = progress

    def between(self, condition: Condition, name: str) -> Distance:
        """Return the distance between engine and trainer under `condition`; `name` labels the progress."""
        with self.progress.stage(name, cost(condition)):
            if condition.trainer.engine_routing:
                assert condition.engine is not None
                self.trainer.routing(self.engine.measure(condition.engine))
            return distance(self._engine(condition.engine), self.trainer.measure(condition.trainer).logprobs)

    def engine_noise(self, condition: EngineCondition) -> Distance:
        """Return the distance between the engine under `condition` and its log-probabilities at sampling."""
        return distance(self._engine(condition), self.sampled.logprobs)

    def trainer_noise(self, condition: TrainerCondition) -> Distance:
        """Return the distance between the trainer under `condition` and its scores in training."""
        own = self.trainer.measure(TrainerCondition())
        return distance(self.trainer.measure(condition).logprobs, own.logprobs)

    def _engine(self, condition: EngineCondition | None) -> Tensor:
        scores = self.sampled if condition is None else token_scores(self.engine.measure(condition))
        return scores.logprobs


def cost(condition: Condition) -> float:
    """Return the most that measuring `condition` can cost, see DECODE_COST."""
    engine = condition.engine
    trainer = SCORE_COST if condition.trainer != TrainerCondition() else 0.0
    if engine is None:
        return trainer
    starts = bool(engine.args) or engine.weights == "files"
    return trainer + DECODE_COST * (3 if engine.batch_size == 1 else 1) + START_COST * starts
