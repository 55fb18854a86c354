"""Checks of requests, and a model's end-of-sequence ids: shared by all engines."""

from __future__ import annotations

from collections.abc import Sequence

from app.engine.errors import RequestError
from app.types import Request


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
