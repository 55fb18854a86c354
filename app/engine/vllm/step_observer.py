"""One generate call of vLLM: watched for progress, its preemptions counted, and cleared up after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from app.engine.errors import EngineFailure
from app.engine.vllm.failures import broken_off
from app.engine.watchdog import Stalled, Watchdog


def observed_generate(
    llm: Any, prompts: list[Any], params: list[Any], stall_timeout: float | None
) -> tuple[list[Any], int]:
    """Return the outputs of `llm.generate` in order, and the number of preemptions.

    Args:
        llm: a vllm.LLM.
        prompts: one for each request, as vLLM expects it.
        params: SamplingParams of each request.
        stall_timeout: longest time for one step, in seconds. None: no limit.

    Raises:
        EngineFailure: if vLLM fails on the way, runs out of memory, or finishes no step within `stall_timeout`.
        EngineError: if vLLM refuses the requests.
    """
    try:
        with Watchdog(stall_timeout, "vLLM") as watchdog, ObservedSteps(llm.llm_engine, watchdog.beat) as steps:
            try:
                outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
            except Exception as error:
                _abort_leftovers(llm.llm_engine)
                raise broken_off(error, refused=not steps.began) from error
    except Stalled as stalled:
        raise EngineFailure(str(stalled)) from None
    return outputs, steps.preemptions


class ObservedSteps:
    """Wraps `llm_engine.step` inside its `with` block: calls `beat` after each step and counts preemptions.

    vLLM's own count needs its statistics, which cost time in every step.
    """

    def __init__(self, llm_engine: Any, beat: Callable[[], None]) -> None:
        self._llm_engine = llm_engine
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
        step = self._llm_engine.step

        def observed() -> Any:
            if not self.began:
                self.began = True
                # Referenced here because the scheduler forgets a finished request, and its count with it.
                self._requests = list(self._llm_engine.engine_core.engine_core.scheduler.requests.values())
            outputs = step()
            self._beat()
            return outputs

        self._llm_engine.step = observed
        return self

    def __exit__(self, *_: Any) -> None:
        """Restore the engine's own step."""
        del self._llm_engine.step


def _abort_leftovers(llm_engine: Any) -> None:
    # A request left in the scheduler after an exception makes the next call hang for ever.
    # Where even this fails the next call sees that requests are still running.
    with contextlib.suppress(Exception):
        llm_engine.abort_request(list(llm_engine.output_processor.request_states), internal=True)
