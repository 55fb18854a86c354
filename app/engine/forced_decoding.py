"""Forced decoding: an engine emits prescribed tokens on its own decode path, key-value cache included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.errors import RequestError
from app.engine.protocol import check_requests
from app.types import Request

FORCED_IDS = "lockstep_forced_ids"
"""Key in `SamplingParams.extra_args`, which vLLM passes through: the ids that the request must emit."""
FORCED_ROW = "lockstep_forced_row"
"""Key in the same dict: index of the request in the call. vLLM itself assigns other request ids."""


@dataclass(frozen=True, kw_only=True)
class ForcedRow:
    """A completion whose tokens an engine must emit."""

    row: int
    """Index of the request in the call, from 0."""
    request: Request
    """The prompt before the completion; its seed is not used."""
    token_ids: tuple[int, ...]
    """Ids of the completion, in order; never empty."""

    @property
    def computed(self) -> int:
        """Number of tokens that the model computes: all but the last, after which nothing is predicted."""
        return len(self.request.token_ids) + len(self.token_ids) - 1


def forced_rows(
    requests: Sequence[Request], completions: Sequence[Sequence[int]], max_model_len: int, vocab_size: int
) -> list[ForcedRow]:
    """Return each request with its completion, all of them checked first.

    Raises:
        RequestError: naming the request's index, if its prompt is bad (see `check_requests`), its completion is empty
            or holds an unknown id, or both together exceed `max_model_len` tokens; or if the counts differ.
    """
    if len(requests) != len(completions):
        raise RequestError(f"{len(requests)} requests but {len(completions)} completions to decode")
    check_requests(requests, max_model_len, vocab_size)
    rows = []
    for index, (request, ids) in enumerate(zip(requests, completions, strict=True)):
        if not ids:
            raise RequestError(f"request {index}: the completion to decode is empty")
        if len(request.token_ids) + len(ids) > max_model_len:
            raise RequestError(
                f"request {index}: {len(request.token_ids)} prompt and {len(ids)} completion tokens do not fit into "
                f"the engine's context max_model_len={max_model_len}"
            )
        unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise RequestError(f"request {index}: completion id {unknown} is outside the vocabulary of {vocab_size}")
        rows.append(ForcedRow(row=index, request=request, token_ids=tuple(ids)))
    return rows
