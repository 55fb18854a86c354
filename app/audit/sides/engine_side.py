"""The engine's side of the audit: the same tokens decoded under several conditions, by one engine at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from app.audit.sides.condition import EngineCondition
from app.audit.types import TokenScores
from app.engine.errors import EngineError
from app.engine.protocol import Engine
from app.types import Decoding, Request, SamplingConfig


class EngineSide:
    """Decodes the audited tokens under any `EngineCondition`, each at most once.

    At most one engine runs: vLLM allows one in a process, and two would not fit into memory. The engine that sampled
    is closed when the first condition needs another, and its state is lost. So measure in this order: conditions with
    the weights it held (see `holds_state`), then those with weights `sent`, then those with other arguments. Successive
    conditions with equal arguments share one engine.

    Args:
        engine: the started engine that sampled. This object owns it from now on and closes it.
        requests: the prompts as they were sent.
        completions: the sampled ids for each request.
        sampling: the sampling settings.
        model_path: a Hugging Face folder with exactly the trainer's weights; further engines are started from it.
        send: puts the trainer's weights into an engine.
        seed: seed for engines that are started here.
        top_k: how many of the likeliest ids to report for each position.
        experts: whether to record router logits wherever the prefix cache is not read.
        pinned: arguments for every further engine unless the condition replaces them: what `engine` chose by itself.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        completions: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        model_path: Path,
        send: Callable[[Engine], None],
        seed: int,
        top_k: int = 5,
        experts: bool = False,
        pinned: Mapping[str, object] | None = None,
    ) -> None:
        self.requests = requests
        self.completions = completions
        self.sampling = sampling
        self.model_path = model_path
        self.send = send
        self.seed = seed
        self.top_k = top_k
        self.experts = experts
        self.pinned = dict(pinned or {})
        self._template = engine  # Closed or not, it knows how to make others.
        self._engine: Engine | None = engine
        self._args: tuple[tuple[str, object], ...] | None = None
        """Arguments replaced in the running engine, which was started here. None: the engine that sampled runs."""
        self._sent = False
        """Whether the running engine was sent the trainer's weights here."""
        self._measured: list[tuple[EngineCondition, list[Decoding]]] = []  # Arguments may hold dicts: no hash.

    @property
    def holds_state(self) -> bool:
        """Whether the engine that sampled still runs, with the weights that it held then."""
        return self._engine is self._template and not self._sent

    def can_measure(self, condition: EngineCondition) -> bool:
        """Whether the condition was measured already, or still can be: it needs no weights that are gone."""
        condition = _as_started(condition)
        return condition.weights != "held" or self.holds_state or self._known(condition) is not None

    def measure(self, condition: EngineCondition) -> list[Decoding]:
        """Return the decodings of all rows under `condition`.

        Raises:
            EngineError: if a condition with `held` weights comes too late; if the engine cannot be started with these
                arguments, cannot be sent weights, or does not support forced decoding.
            ValueError: if the engine has no such argument.
        """
        condition = _as_started(condition)
        if (known := self._known(condition)) is not None:
            return known
        engine = self._prepared(condition)
        decodings = engine.decode(
            self.requests,
            self.completions,
            neutral(self.sampling) if condition.neutral_sampling else self.sampling,
            top_k=self.top_k,
            batch_size=condition.batch_size,
            read_prefix_cache=condition.read_prefix_cache,
            router_logits=self.experts and not condition.read_prefix_cache,
        )
        self._measured.append((condition, decodings))
        return decodings

    def consumed_prompts(self) -> list[tuple[int, ...]]:
        """Return the prompt ids that the engine that sampled really consumed, row by row."""
        return [decoding.prompt_ids for decoding in self.measure(EngineCondition())]

    def weights_differing(self, expected: Mapping[str, int]) -> list[str]:
        """Return the names of weights that differ between engine and trainer, or that the engine lacks.

        Weights whose form in the engine is unknown (`WeightLayout.opaque`) are left out, and so are further names for
        a tied weight that the engine does not have.

        Args:
            expected: checksums of the trainer's weights in the engine's dtype, by Hugging Face name.

        Raises:
            EngineError: if the engine no longer holds the weights that it sampled with.
        """
        if self._engine is None or not self.holds_state:
            raise EngineError("the engine no longer holds the weights that it sampled with: compare them earlier")
        sums, layout = self._engine.checksums(), self._engine.weight_layout()
        known = [name for name in expected if (name in sums or name in layout.shapes) and not layout.is_opaque(name)]
        return [name for name in known if sums.get(name) != expected[name]]

    def close(self) -> None:
        """Close the running engine, if any. Closing twice is fine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _known(self, condition: EngineCondition) -> list[Decoding] | None:
        return next((decodings for known, decodings in self._measured if known == condition), None)

    def _prepared(self, condition: EngineCondition) -> Engine:
        """Return the running engine in the state that the condition needs; start another one if necessary."""
        if condition.weights == "held":
            if self._engine is None or not self.holds_state:
                raise EngineError(
                    "the engine no longer holds the weights that it sampled with: measure conditions with held weights "
                    "before those that send weights or start another engine"
                )
            return self._engine
        started_here = self._args is not None
        fits = started_here and self._args == condition.args and (condition.weights == "sent" or not self._sent)
        sampled_here = not started_here and not condition.args and condition.weights == "sent"
        engine = self._engine if fits or sampled_here else None
        if engine is None:
            engine = self._start(condition.args)
        if condition.weights == "sent" and not self._sent:
            self._sent = True
            self.send(engine)
        return engine

    def _start(self, args: tuple[tuple[str, object], ...]) -> Engine:
        # Before anything is closed, so that an unknown argument costs nothing.
        engine = self._template.variant(**{**self.pinned, **dict(args)})
        self.close()
        engine.start(str(self.model_path), self.seed)
        self._engine, self._args, self._sent = engine, args, False
        return engine


def _as_started(condition: EngineCondition) -> EngineCondition:
    """The condition as it is measured: a new engine holds the weights of its files."""
    new = condition.args and condition.weights == "held"
    return dataclasses.replace(condition, weights="files") if new else condition


def neutral(sampling: SamplingConfig) -> SamplingConfig:
    """Return the sampling without filters and penalties, at the same temperature."""
    return SamplingConfig(temperature=sampling.temperature, max_tokens=sampling.max_tokens)


def token_scores(decodings: Sequence[Decoding]) -> TokenScores:
    """Return the scores of all rows' tokens in one; without likeliest ids where none were requested."""
    logprobs = [value for decoding in decodings for value in decoding.logprobs]
    top_ids = [ids for decoding in decodings for ids in decoding.top_ids]
    top_logprobs = [values for decoding in decodings for values in decoding.top_logprobs]
    has_top = bool(top_ids) and len(top_ids[0]) > 0
    return TokenScores(
        logprobs=torch.tensor(logprobs, dtype=torch.float64),
        top_ids=torch.tensor(top_ids) if has_top else None,
        top_logprobs=torch.tensor(top_logprobs, dtype=torch.float64) if has_top else None,
    )
