"""The engine protocol: what every engine that samples completions must guarantee."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from app.engine.errors import EngineError, RequestError
from app.engine.weight_layout import WeightLayout
from app.types import Completion, Decoding, Request, SamplingConfig


class Engine(ABC):
    """Samples completions with the weights that it is sent.

    Constructing an engine is cheap; `start` loads the model. Between two `load_weights` the completions depend only on
    the requests, never on earlier calls.
    """

    policy_version: int = -1
    """`global_step` of the weights in the engine; -1 before the first `load_weights`."""
    returns_logprobs: bool = True
    """Whether completions carry log-probabilities. Without them nothing can be measured or corrected."""

    _origin: tuple[str, int] | None = None
    """Model path and seed from the last `start`, which sets it for `restart`."""
    arguments: Mapping[str, Any] = {}
    """Constructor arguments by name, defaults included; empty: the engine supports no variants."""

    @abstractmethod
    def start(self, model_path: str, seed: int) -> None:
        """Load the model at `model_path` (a Hugging Face folder). Raises EngineError if the engine cannot run."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Sample one completion per request, in order, with `logprobs` of the distribution sampled from.

        Raises:
            ValueError: naming the row, if a prompt is empty, too long or holds an unknown id.
            EngineFailure: if the engine broke off its work; after `restart` the same call may succeed.
            EngineError: if it cannot carry out the call, even after a restart.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Replace all weights by `weights`, the full set by Hugging Face name, and reset the caches.

        The iterable is consumed one tensor at a time, so the sender may gather lazily.
        """

    @abstractmethod
    def checksums(self) -> dict[str, int]:
        """Return the checksum of every weight that the engine computes with, by Hugging Face name.

        See `app.weights.checksum`. A tied head is also listed under its own name.
        """

    @abstractmethod
    def weight_layout(self) -> WeightLayout:
        """Return the names, shapes and dtypes of the weights that `load_weights` needs."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine's memory. Closing twice is fine."""

    def decode(
        self,
        requests: Sequence[Request],
        completions: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        top_k: int = 5,
        batch_size: int | None = None,
        read_prefix_cache: bool = True,
        router_logits: bool = False,
    ) -> list[Decoding]:
        """Decode forced tokens one by one, as if they had been sampled. The audit needs this; training does not.

        Args:
            requests: the prompts; their seeds are not used.
            completions: the ids to decode after each prompt.
            sampling: defines the distribution that the log-probabilities belong to; an id that it filters out has
                -inf. `max_tokens` and end-of-sequence ids do not end a completion.
            top_k: how many of the likeliest ids to report for each position.
            batch_size: most requests decoded together; None: as many as the engine takes.
            read_prefix_cache: whether cached blocks of a prompt are used; False: every prompt is computed.
            router_logits: whether to report those of every mixture-of-experts layer; needs `read_prefix_cache=False`.

        Raises:
            ValueError: naming the request, if it or its completion cannot be decoded.
            EngineError: if the engine does not support forced decoding, or decoded other tokens.
        """
        raise EngineError(f"{type(self).__name__} does not support forced decoding: it has no method `decode`")

    def variant(self, **arguments: Any) -> Self:
        """Return a new engine of this class, not started, with some constructor arguments replaced.

        Raises:
            ValueError: naming an argument that the constructor does not have.
            EngineError: if the engine does not know how it was constructed, see `arguments`.
        """
        if not self.arguments:
            raise EngineError(f"{type(self).__name__} cannot be started with other arguments: it sets no `arguments`")
        for name in arguments:
            if name not in self.arguments:
                raise ValueError(f"{type(self).__name__} has no argument {name!r}; it has {', '.join(self.arguments)}")
        return type(self)(**{**self.arguments, **arguments})

    def restart(self) -> None:
        """Close the engine and start it anew, with the model and the seed from the last `start`.

        It then holds the weights of the files, as version -1: send the current ones before sampling. In a process group
        all ranks must call it together, as they do `start`.

        Raises:
            EngineError: if the engine was never started, or cannot start again.
        """
        if self._origin is None:
            raise EngineError("the engine was never started: there is nothing to restart")
        self.close()
        self.policy_version = -1
        self.start(*self._origin)


def constructor_arguments(local: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor by name, from the `locals()` at its beginning."""
    return {name: value for name, value in local.items() if name not in ("self", "__class__")}


def check_requests(requests: Sequence[Request], max_model_len: int, vocab_size: int) -> None:
    """Check every prompt before the call, so that a bad one is named and the others are not lost with it.

    Raises:
        RequestError: naming the request's index, if its prompt is empty, leaves no room for a token in the context of
            `max_model_len` tokens, or holds an id outside [0, vocab_size).
    """
    for index, request in enumerate(requests):
        length = len(request.token_ids)
        if length == 0:
            raise RequestError(f"request {index}: the prompt is empty")
        if length >= max_model_len:
            raise RequestError(
                f"request {index}: the prompt has {length} tokens and the engine's context max_model_len="
                f"{max_model_len} holds prompt and completion; shorten the prompt or raise max_model_len"
            )
        unknown = next((token for token in request.token_ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise RequestError(
                f"request {index}: token id {unknown} is outside the model's vocabulary of {vocab_size} ids"
            )
