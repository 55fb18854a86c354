import dataclasses
import math

import pytest
import torch

from app.data.collate import collate, sampled_values, split_by_tokens, split_evenly, uncollate
from app.types import TrainRow
from tests.rows import prompt_lengths


def row(prompt: int, completion: int, **kwargs) -> TrainRow:
    defaults = dict(
        prompt_ids=tuple(range(1, prompt + 1)),
        completion_ids=tuple(range(50, 50 + completion)),
        rollout_logprobs=(-0.5,) * completion,
        advantage=1.0,
        reward=0.25,
    )
    return TrainRow.of_completion(**{**defaults, **kwargs})


def batch_of(rows):
    return collate(rows, pad_token_id=9)


def test_collate_right_pads_and_masks():
    batch = batch_of([row(2, 1), row(1, 3)])
    assert batch.input_ids.tolist() == [[1, 2, 50, 9], [1, 50, 51, 52]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.rollout_logprobs.tolist() == [[-0.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]
    assert prompt_lengths(batch) == (2, 1)
    assert batch.sampled_tokens == (1, 3)
    assert batch.old_logprobs is None


def test_a_row_without_rollout_logprobs_is_missing_and_the_others_stay():
    rollout = batch_of([row(1, 1), row(1, 2, rollout_logprobs=None)]).rollout_logprobs
    assert rollout[0].tolist() == [-0.5, 0.0]
    assert rollout[1].isnan().all()


def test_the_loss_mask_is_the_mask_unless_a_row_says_otherwise():
    batch = batch_of([row(1, 1), row(1, 3, loss_mask=(True, False, True))])
    assert batch.loss_mask.tolist() == [[True, False, False], [True, False, True]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]


def test_a_missing_value_stays_nan():
    assert math.isnan(batch_of([row(1, 2, rollout_logprobs=(-1.0, math.nan))]).rollout_logprobs[0, 1])


def test_to_keeps_host_fields_and_moves_tensors():
    moved = batch_of([row(1, 1)]).to("meta")
    assert moved.input_ids.device.type == "meta"
    assert moved.rewards.device.type == "meta"
    assert (moved.lengths, moved.sampled_tokens) == ((2,), (1,))
    assert dataclasses.is_dataclass(moved)


TURNS = TrainRow(
    token_ids=(5, 6, 20, 21, 7, 8, 22),
    sampled=(False, False, True, True, False, False, True),
    policy_versions=(3, 3, 4),
    rollout_logprobs=(-0.5, math.nan, -0.25),
    old_logprobs=(-0.5, -1.0, -2.0),
    loss_mask=(True, False, True),
    advantage=-1.0,
    reward=0.5,
)
"""Two stretches of sampled tokens, with a tool's answer (7, 8) between them."""


def test_foreign_tokens_between_sampled_ones_have_no_place_in_what_is_per_sampled_token():
    batch = batch_of([row(1, 2, old_logprobs=(-3.0, -4.0)), TURNS])
    assert batch.input_ids.tolist() == [[1, 50, 51, 9, 9, 9, 9], list(TURNS.token_ids)]
    assert batch.positions.tolist() == [[1, 2, 1], [2, 3, 6]]
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.policy_versions.tolist() == [[-1, -1, 0], [3, 3, 4]]
    assert batch.old_logprobs.tolist() == [[-3.0, -4.0, 0.0], [-0.5, -1.0, -2.0]]
    assert (batch.lengths, batch.sampled_tokens) == ((3, 7), (2, 3))


def test_rows_come_back_as_they_went_in():
    batch = batch_of([row(1, 2, old_logprobs=(-3.0, -4.0), policy_version=2), TURNS])
    second, first = uncollate(batch, [1, 0])
    assert first == row(1, 2, old_logprobs=(-3.0, -4.0), policy_version=2, loss_mask=(True, True))
    assert math.isnan(second.rollout_logprobs[1])
    assert dataclasses.replace(second, rollout_logprobs=None) == dataclasses.replace(TURNS, rollout_logprobs=None)
    assert (second.prompt_ids, second.completion_ids, second.sampled_ids) == ((5, 6), (20, 21, 7, 8, 22), (20, 21, 22))
    assert sampled_values(batch.old_logprobs, batch, [0]) == [(-3.0, -4.0)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sampled": (False, True)}, "sampled has 2 values for 7 token ids"),
        ({"sampled": (True, *TURNS.sampled[1:])}, "its first token is given"),
        ({"sampled": (False,) * 7}, "its first token is given"),
        ({"policy_versions": (3,)}, "policy_versions has 1 values for 3 sampled tokens"),
        ({"rollout_logprobs": (-0.5,) * 7}, "rollout_logprobs has 7 values for 3 sampled tokens"),
    ],
)
def test_a_row_whose_fields_do_not_fit_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TURNS, **fields)


def test_split_by_tokens_counts_padding():
    # runs: 2*3=6 fits, adding the 5 makes 3*5=15 > 10; 5 alone; 12 alone although above the budget
    assert split_by_tokens([2, 3, 5, 12], 10) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert split_by_tokens([2, 3], None) == [slice(0, 2)]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_split_evenly_gives_exactly_the_parts_and_every_row_once(parts):
    lengths = sorted([3, 9, 4, 4, 20, 7])
    runs = split_evenly(lengths, parts)
    assert len(runs) == parts
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(6))
    assert all(run.stop > run.start for run in runs)


def test_split_evenly_balances_padded_tokens():
    runs = split_evenly([10] * 8, 4)
    assert [run.stop - run.start for run in runs] == [2, 2, 2, 2]


def test_split_evenly_refuses_more_parts_than_rows():
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        split_evenly([1, 2], 3)


def test_token_padding_is_int64():
    assert batch_of([row(2, 2)]).input_ids.dtype == torch.int64
