"""The rounds of the attribution: one factor is removed after the other, each time the one that explains most."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from app.audit.attribution.attribution import LEAST_SHARE, rank, share, verdict
from app.audit.attribution.factors import Pipeline, Toggle, toggles
from app.audit.measure import Measurements, cost
from app.audit.sides.condition import Condition, TrainerCondition
from app.audit.sides.sampling import Effort
from app.audit.types import Distance, FactorResult, Round
from app.errors import LockstepError, first_line, listed

REPRODUCES = 0.2
"""Largest part of a difference that may be left if a cause is to count as reproducing it."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Toggles the factors of a pipeline round by round."""

    measured: Measurements
    """The two sides, and the distances between them."""
    pipeline: Pipeline
    """What is audited; temperatures and sampling supports are fitted later."""
    floor: Distance
    """The noise floor: largest distances that count as noise."""
    effort: Effort
    """How many rounds, and whether a round goes on after a factor that explains all of it."""
    differing: Sequence[str]
    """Names of weights that differed between engine and trainer."""
    notes: list[str]
    """List to which notes on what was not tried are appended."""

    def rounds(self) -> tuple[Round, ...]:
        """Measure and return the rounds; in the last the best factor leaves only noise, or explains too little."""
        options = toggles(self._fitted())
        order = [option.key for option in options]
        condition = Condition()
        taken: tuple[str, ...] = ()
        rounds: list[Round] = []
        for _ in range(self.effort.rounds):
            start = self.measured.between(condition, "what is left")
            tried = self._try([option for option in options if option.key not in taken], condition, start)
            if not tried:
                break
            ranked = rank([result for result, _ in tried.values()], order)
            rounds.append(Round(taken_away=taken, start=start, factors=ranked))
            best = ranked[0]
            if best.share < LEAST_SHARE or verdict(best.left, self.floor) != "mismatch":
                break
            condition, taken = tried[best.key][1], (*taken, best.key)
        return tuple(rounds)

    def _fitted(self) -> Pipeline:
        """Add the temperatures and sampling supports that fit the scores."""
        trainer = self.measured.trainer
        own, alone = TrainerCondition(), TrainerCondition(arrangement="single_rows")
        really = trainer.fit_temperature(trainer.measure(own))
        # Any fault in the scoring shifts the fit somewhat: it is the temperature if that alone reproduces the scores.
        off = self.measured.trainer_noise(alone)
        at_it = self.measured.trainer_noise(dataclasses.replace(alone, temperature=really))
        return dataclasses.replace(
            self.pipeline,
            engine_temperature=trainer.fit_temperature(self.measured.sampled),
            trainer_temperature=really if at_it.rms < REPRODUCES * off.rms else self.pipeline.trainer_temperature,
            supports=trainer.fit_support(),
        )

    def _try(
        self, options: Sequence[Toggle], condition: Condition, start: Distance
    ) -> dict[str, tuple[FactorResult, Condition]]:
        """Measure what each toggle leaves; of several with one key the one that explains most counts."""
        tried: dict[str, tuple[FactorResult, Condition]] = {}
        possible = self._possible(options, condition)
        options = sorted(
            possible, key=lambda option: option.disruption(condition)
        )  # the engine that sampled is closed last
        progress, costs = self.measured.progress, [cost(option.apply(condition)) for option in options]
        progress.expect(sum(costs))
        for done, option in enumerate(options, start=1):
            changed = option.apply(condition)
            try:
                left = self.measured.between(changed, f"without: {option.title}")
            except LockstepError as error:
                self.notes.append(f"{option.title} ({option.change}) could not be tried: {first_line(error)}")
                continue
            result = FactorResult(
                key=option.key,
                title=option.title,
                side=option.side,
                change=option.change,
                left=left,
                share=share(start, left, self.floor),
                remedy=option.remedy,
                evidence=self._evidence(option),
            )
            if option.key not in tried or tried[option.key][0].share < result.share:
                tried[option.key] = (result, changed)
            if not self.effort.tries_all and verdict(left, self.floor) != "mismatch":
                progress.expect(-sum(costs[done:]))
                if skipped := [other.title for other in options[done:]]:
                    self.notes.append(f"not tried, since that explains it: {', '.join(dict.fromkeys(skipped))}")
                break
        return tried

    def _possible(self, options: Sequence[Toggle], condition: Condition) -> list[Toggle]:
        """Leave out, with a note, toggles that need the engine that sampled after it was closed."""
        possible: list[Toggle] = []
        gone: list[Toggle] = []
        for option in options:
            engine = option.apply(condition).engine
            measurable = engine is None or self.measured.engine.can_measure(engine)
            (possible if measurable else gone).append(option)
        if gone:
            titles = ", ".join(dict.fromkeys(option.title for option in gone))
            self.notes.append(f"not tried on what is left, since the engine that sampled is closed by then: {titles}")
        return possible

    def _evidence(self, option: Toggle) -> str:
        if self.differing and option.key in ("weights", "lora_merge"):
            return f"the engine held other weights than the trainer: {listed(self.differing)}"
        return ""
