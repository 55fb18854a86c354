"""How many rows an audit asks for, of which prompts, with which seeds."""

from __future__ import annotations

import math

import pytest

from app.audit.sides.sampling import EFFORTS, plan_requests, sample_rows
from app.errors import LockstepError
from app.types import Completion, Prompt, SamplingConfig


def prompts(count: int) -> list[Prompt]:
    return [Prompt(row=i, prompt=str(i), token_ids=(i, 1), columns={}) for i in range(count)]


@pytest.mark.parametrize(("max_tokens", "rows", "length"), [(8, 125, 8), (256, 21, 48), (1, 128, 1), (48, 21, 48)])
def test_quick_mode_aims_at_a_thousand_tokens(max_tokens: int, rows: int, length: int) -> None:
    requests, sampling = plan_requests(prompts(50), SamplingConfig(max_tokens=max_tokens), EFFORTS["quick"], None, 1)
    assert (len(requests), sampling.max_tokens) == (rows, length)
    assert rows == min(max(math.ceil(1000 / length), 16), 128)


def test_prompts_are_spread_come_in_pairs_and_never_draw_alike() -> None:
    requests, sampling = plan_requests(prompts(100), SamplingConfig(max_tokens=9), EFFORTS["thorough"], 8, 1)
    assert [request.token_ids[0] for request in requests] == [0, 0, 25, 25, 50, 50, 75, 75]
    assert len({request.seed for request in requests}) == 8
    assert sampling.max_tokens == 9
    again, _ = plan_requests(prompts(3), SamplingConfig(), EFFORTS["quick"], 10, 1)
    assert [request.token_ids[0] for request in again] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert len({request.seed for request in again}) == 10


def test_an_engine_without_log_probabilities_cannot_be_audited() -> None:
    class Silent:
        def generate(self, requests: object, sampling: object) -> list[Completion]:
            return [Completion(token_ids=(1,), logprobs=None, finish_reason="length")]

    requests, sampling = plan_requests(prompts(1), SamplingConfig(), EFFORTS["quick"], 1, 1)
    with pytest.raises(LockstepError, match="Silent gives no log-probabilities"):
        sample_rows(Silent(), requests, sampling)  # type: ignore[arg-type]
