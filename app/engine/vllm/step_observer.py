"""What happens in vLLM's step loop during one generate call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ObservedSteps:
    """Wraps `llm_engine.step` inside its `with` block: calls `beat` after each step and counts preemptions.

    vLLM's own count needs its statistics, which cost time in every step.
    """

    def __init__(self, llm_engine: Any, beat: Callable[[], None]) -> None:
        self._engine = llm_engine
        self._beat = beat
        self._requests: list[Any] = []
        self.began = False
        """Whether a step was begun: a refusal of the requests comes before the first."""

    @property
    def preemptions(self) -> int:
        """How often a request lost its cache blocks to another and had to be computed again."""
        return sum(getattr(request, "num_preemptions", 0) for request in self._requests)

    def __enter__(self) -> ObservedSteps:
        """Begin to observe."""
        step = self._engine.step

        def observed() -> Any:
            if not self.began:
                self.began = True
                # Held here: the scheduler forgets a request, with its count, when it is finished.
                self._requests = list(self._engine.engine_core.engine_core.scheduler.requests.values())
            outputs = step()
            self._beat()
            return outputs

        self._engine.step = observed
        return self

    def __exit__(self, *_: Any) -> None:
        """Give the engine its own step back."""
        del self._engine.step
