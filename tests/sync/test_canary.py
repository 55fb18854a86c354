from __future__ import annotations

import pytest
import torch

from app.sync.canary import canary_requests, compare_logprobs, mean_tolerance, scored_rows
from app.sync.verify import SyncError
from app.types import Completion, Request
from tests.sync.tiny_model import random_requests


def _completion(*logprobs: float) -> Completion:
    return Completion(token_ids=tuple(range(len(logprobs))), logprobs=logprobs, finish_reason="length")


def test_mean_and_max_are_over_all_tokens() -> None:
    report = compare_logprobs([_completion(-1.0, -2.0), _completion(-3.0)], [[-1.25, -2.0], [-2.5]], tolerance=0.3)
    assert (report.mean_abs_diff, report.max_abs_diff, report.tokens) == (0.25, 0.5, 3)


def test_a_large_mean_fails_with_the_numbers() -> None:
    with pytest.raises(SyncError, match=r"2\.50e-01 nats apart on average and 5\.00e-01 at most, over 3 tokens"):
        compare_logprobs([_completion(-1.0, -2.0), _completion(-3.0)], [[-1.25, -2.0], [-2.5]], tolerance=0.2)


def test_one_token_far_off_fails_though_the_mean_passes() -> None:
    ours, theirs = [-1.0] * 1000, [-1.0] * 999 + [-1.3]
    with pytest.raises(SyncError, match=r"3\.00e-01 at most"):
        compare_logprobs([_completion(*ours)], [theirs], tolerance=0.01)


@pytest.mark.parametrize("position", [0, 1])
def test_nan_fails(position: int) -> None:
    values = [-1.0, -1.0]
    values[position] = float("nan")
    with pytest.raises(SyncError, match="nan"):
        compare_logprobs([_completion(-1.0, -1.0)], [values], tolerance=1.0)


def test_missing_logprobs_and_lengths_fail() -> None:
    silent = Completion(token_ids=(3,), logprobs=None, finish_reason="stop")
    for completion, scored in ((silent, [-1.0]), (_completion(-1.0), [-1.0, -2.0])):
        with pytest.raises(SyncError, match="canary row 0"):
            compare_logprobs([completion], [scored], tolerance=1.0)
    with pytest.raises(SyncError, match="generated no token"):
        compare_logprobs([], [], tolerance=1.0)


def test_the_coarser_side_sets_the_tolerance() -> None:
    assert mean_tolerance(torch.float32, torch.bfloat16) == mean_tolerance(torch.bfloat16, torch.bfloat16)
    # Above the measured error of equal weights, below that of weights one optimiser step old (FACTS in the module).
    assert 6e-6 < mean_tolerance(torch.float32, torch.float32) < 1.6e-3
    assert mean_tolerance(torch.float16, torch.float32) > 4.4e-3
    assert mean_tolerance(torch.bfloat16, torch.bfloat16) > 4.6e-2
    assert mean_tolerance(torch.bfloat16, torch.bfloat16, lossy=True) > 0.371


def test_the_scorer_is_asked_about_what_the_engine_generated() -> None:
    requests = canary_requests([[4, 5], [6]], seed=0)
    assert scored_rows(requests, [_completion(-1.0, -2.0) for _ in requests]) == [((4, 5), (0, 1)), ((6,), (0, 1))]


def test_requests_are_for_the_first_prompts_each_with_a_seed_of_its_own() -> None:
    requests = canary_requests([(4, 5), (6,), (7, 8)], seed=11, rows=2)
    assert requests == [Request(token_ids=(4, 5), seed=11), Request(token_ids=(6,), seed=12)]
    assert canary_requests([], seed=11) == []


def test_random_requests_are_longer_than_a_cache_block_and_in_the_vocabulary() -> None:
    requests = random_requests(vocab_size=9, rows=2, length=33)
    assert all(0 <= token < 9 for request in requests for token in request.token_ids)
    assert [len(request.token_ids) for request in requests] == [33, 33]
    assert len({request.token_ids for request in requests}) == 2
