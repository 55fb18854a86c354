import dataclasses
import math

import pytest
import torch

from app.data.collate import collate, split_by_tokens, split_evenly
from app.types import TrainRow


def row(prompt: int, completion: int, **kwargs) -> TrainRow:
    defaults = dict(
        prompt_ids=tuple(range(1, prompt + 1)),
        completion_ids=tuple(range(50, 50 + completion)),
        rollout_logprobs=(-0.5,) * completion,
        advantage=1.0,
        reward=0.25,
    )
    return TrainRow(**{**defaults, **kwargs})


def batch_of(rows):
    return collate(rows, pad_token_id=9)


def test_collate_right_pads_and_masks():
    batch = batch_of([row(2, 1), row(1, 3)])
    assert batch.input_ids.tolist() == [[1, 2, 50, 9], [1, 50, 51, 52]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.rollout_logprobs.tolist() == [[-0.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]
    assert batch.prompt_tokens == (2, 1)
    assert batch.completion_tokens == (1, 3)
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
    assert moved.prompt_tokens == (1,)
    assert dataclasses.is_dataclass(moved)


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
