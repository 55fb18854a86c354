"""The guard against losses and gradients that are not finite."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed

from app.data.collate import collate
from app.errors import LockstepError
from app.guards.nonfinite import NonFiniteConfig, NonFiniteGuard, suspicion
from app.guards.row_file import read_rows, recorded_rows
from app.types import StepSums, StepTotals, TrainRow
from app.world import World
from tests.ranks import on_ranks

TOTALS = StepTotals(
    tokens=9, rows=4, micro_batches=2, sums=StepSums(weight_sum=0.1, weight_count=9, kept_tokens=8, kept_rows=3)
)


def row(index: int, tokens: int = 2, **fields) -> TrainRow:
    return TrainRow.of_completion(
        **{
            "prompt_ids": (1, 2),
            "completion_ids": tuple(range(10 * index, 10 * index + tokens)),
            "policy_version": 6,
            "rollout_logprobs": (-0.1,) * tokens,
            "old_logprobs": (-0.1,) * tokens,
            "advantage": 1.0,
            "reward": float(index),
            **fields,
        }
    )


def batch(*rows: TrainRow):
    return collate(rows, pad_token_id=0, totals=TOTALS)


def logprobs(rows, value: float = -0.1):
    return torch.where(rows.mask, value, 0.0)


def guard(folder: Path, **fields) -> NonFiniteGuard:
    config = NonFiniteConfig(**fields)
    return NonFiniteGuard(
        config, folder, World(), lambda: {"model.temperature": 1.0}, decode=lambda ids: f"text {list(ids)}"
    )


def watch(watching: NonFiniteGuard, *rows: TrainRow, new=None, loss: float = 0.5) -> None:
    micro_batch = batch(*rows)
    watching.watch(micro_batch, logprobs(micro_batch) if new is None else new, torch.tensor(loss))


def test_a_finite_step_is_taken_and_leaves_nothing_behind(tmp_path):
    watching = guard(tmp_path)
    watch(watching, row(0))
    assert watching.close_step(torch.tensor(1.0), 1) is False
    assert (watching.consecutive, watching.skipped) == (0, 0)
    assert not list(tmp_path.iterdir())


def test_a_nan_log_probability_is_found_in_its_row(tmp_path):
    watching = guard(tmp_path)
    watch(watching, row(0), row(1))
    second = batch(row(2, tokens=3), row(3))
    new = logprobs(second)
    new[1, 1] = math.nan
    watching.watch(second, new, new.sum())
    with pytest.warns(
        UserWarning, match=r"optimiser step 7: the loss is not finite, all ranks skip it \(1 in a row\)"
    ) as said:
        assert watching.close_step(torch.tensor(math.nan), 7) is True
    path = tmp_path / "non_finite" / "step=7-rank=0.jsonl"
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert f"python -m app replay --config CONFIG --ckpt_path last --rows {path}" in str(said[0].message)
    header, (found,) = read_rows(path)
    assert (header.step, header.rank, header.reason) == (7, 0, "loss")
    assert found.row.policy_versions == (6, 6)
    assert math.isnan(header.gradient_norm)
    assert header.totals == TOTALS
    assert header.rows_on_rank == 4
    assert header.settings == {"model.temperature": 1.0}
    assert found.row.completion_ids == (30, 31)
    assert found.new_logprobs[0] == torch.tensor(-0.1).item()
    assert math.isnan(found.new_logprobs[1])
    assert (found.prompt, found.completion) == ("text [1, 2]", "text [30, 31]")


@pytest.mark.parametrize(
    "fields",
    [
        {"advantage": math.nan},
        {"old_logprobs": (-0.1, -math.inf)},
        {"ref_logprobs": (math.nan, -0.1)},
        {"rollout_logprobs": (-math.inf, -0.1)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_row_whose_own_numbers_are_not_finite_is_found(tmp_path, fields):
    reference = {"ref_logprobs": (-0.1, -0.1)}
    watching = guard(tmp_path)
    watch(watching, row(0, **reference), row(1, **{**reference, **fields}), row(2, **reference), loss=math.inf)
    with pytest.warns(UserWarning, match="1 rows are in"):
        assert watching.close_step(None, 1)
    header, (found,) = read_rows(tmp_path / "non_finite" / "step=1-rank=0.jsonl")
    assert found.row.completion_ids == (10, 11)
    assert header.gradient_norm is None


def test_without_a_broken_row_those_of_the_bad_micro_batch_are_written_by_drift(tmp_path):
    watching = guard(tmp_path, max_rows=2)
    watch(watching, row(0))
    drifted = batch(row(1), row(2, old_logprobs=(-90.0, -0.1)), row(3, old_logprobs=(-0.1, -5.0)))
    watching.watch(drifted, logprobs(drifted), torch.tensor(math.inf))
    with pytest.warns(UserWarning, match="2 rows are in"):
        assert watching.close_step(torch.tensor(math.inf), 1)
    _, rows = read_rows(tmp_path / "non_finite" / "step=1-rank=0.jsonl")
    assert [found.row.reward for found in rows] == [2.0, 3.0]  # |new - old| 89.9, 4.9, then 0


def test_a_gradient_alone_brings_all_recorded_rows_the_step(tmp_path):
    watching = guard(tmp_path)
    watch(watching, row(0), row(1))
    watch(watching, row(2))
    with pytest.warns(UserWarning, match="the gradient is not finite"):
        assert watching.close_step(torch.tensor(math.inf), 1)
    header, rows = read_rows(tmp_path / "non_finite" / "step=1-rank=0.jsonl")
    assert header.reason == "gradient"
    assert header.gradient_norm == math.inf
    assert sorted(found.row.reward for found in rows) == [0.0, 1.0, 2.0]


def test_a_missing_rollout_log_probability_is_no_fault():
    rows = batch(row(0, rollout_logprobs=(math.nan, -0.1), old_logprobs=None), row(1, rollout_logprobs=None))
    assert suspicion(rows, logprobs(rows)).tolist() == [0.0, 0.0]


def test_what_stands_at_masked_places_is_not_read():
    rows = batch(row(0, tokens=1), row(1, tokens=3))
    new = logprobs(rows)
    new[0, 2] = math.nan
    assert suspicion(rows, new).tolist() == [0.0, 0.0]


def test_the_run_ends_at_the_limit_and_a_good_step_starts_the_count_anew(tmp_path):
    watching = guard(tmp_path, max_consecutive_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, norm in enumerate([math.nan, 1.0, math.nan], start=1):
            watch(watching, row(0))
            assert watching.close_step(torch.tensor(norm), step) is not math.isfinite(norm)
        assert watching.state_dict() == {"consecutive": 1, "skipped": 2}
        resumed = guard(tmp_path, max_consecutive_steps=2)
        resumed.load_state_dict(watching.state_dict())
        watch(resumed, row(0))
        with pytest.raises(LockstepError, match=r"2 optimiser steps in a row .*non_finite.*learning_rate") as error:
            resumed.close_step(torch.tensor(math.nan), 4)
    assert "\n" not in str(error.value)
    assert (tmp_path / "non_finite" / "step=4-rank=0.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "non_finite").write_text("a file")
    watching = guard(tmp_path)
    watch(watching, row(0), loss=math.nan)
    with pytest.warns(UserWarning, match="could not be written to"):
        assert watching.close_step(None, 1) is True


def test_a_full_disk_is_a_warning_and_leaves_no_half_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    watching = guard(tmp_path)
    watch(watching, row(0), loss=math.nan)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert watching.close_step(None, 1) is True
    assert not list((tmp_path / "non_finite").iterdir())


@pytest.mark.parametrize("name", ["max_consecutive_steps", "max_rows"])
def test_a_limit_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"^model.non_finite.{name}=0: must be at least 1$"):
        NonFiniteConfig(**{name: 0})


def test_rows_survive_the_file_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def noise(tokens: int) -> tuple[float, ...]:
        bits = torch.randint(-(2**31), 2**31, (tokens,), generator=generator).to(torch.int32)
        return tuple(bits.view(torch.float32).tolist())  # any float32: NaN, subnormal, huge

    special = (math.nan, math.inf, -math.inf, -0.0, 1e-45, 3.4028234663852886e38)
    rows = batch(
        row(0, tokens=6, rollout_logprobs=special, old_logprobs=noise(6), ref_logprobs=noise(6)),
        row(
            *(1, 40),
            rollout_logprobs=noise(40),
            old_logprobs=noise(40),
            ref_logprobs=noise(40),
            loss_mask=(True, False) * 20,
            advantage=-1.17549435e-38,
            reward=math.nan,
        ),
    )
    watching = guard(tmp_path)
    watching.watch(rows, torch.full_like(rows.rollout_logprobs, math.nan), torch.tensor(math.nan))
    with pytest.warns(UserWarning, match="not finite"):
        watching.close_step(None, 1)
    header, found = read_rows(tmp_path / "non_finite" / "step=1-rank=0.jsonl")
    again = collate(
        [recorded.row for recorded in found],
        pad_token_id=0,
        totals=header.totals,
        correctable=header.correctable,
    )
    for field in dataclasses.fields(rows):
        before, after = getattr(rows, field.name), getattr(again, field.name)
        if isinstance(before, torch.Tensor):
            assert before.dtype == after.dtype
            if before.is_floating_point():
                assert torch.equal(before.isnan(), after.isnan())
                before, after = (value.nan_to_num(nan=0.0).view(torch.int32) for value in (before, after))
            assert torch.equal(before, after), field.name
        else:
            assert before == after, field.name


def spoil(lines: list[str], line: int, change) -> str:
    fields = json.loads(lines[line])
    change(fields)
    return "".join([*lines[:line], json.dumps(fields) + "\n", *lines[line + 1 :]])


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (0, lambda f: f.update(format="other"), "line 1: format 'other' is not"),
        (0, lambda f: f.pop("totals"), "line 1: no 'totals'"),
        (0, lambda f: f.update(extra=1), "line 1: .*extra"),
        (1, lambda f: f.pop("new_logprobs"), "line 2: no 'new_logprobs'"),
        (1, lambda f: f.pop("advantage"), "line 2: .*advantage"),
        (1, lambda f: f["old_logprobs"].pop(), "line 2: old_logprobs has 1 values for 2 sampled tokens"),
        (1, lambda f: f.update(sampled=[False] * 4), "line 2: a row needs a prompt and a completion"),
    ],
)
def test_a_spoilt_file_is_refused_in_one_line(tmp_path, line, change, said):
    watching = guard(tmp_path)
    watch(watching, row(0), loss=math.nan)
    with pytest.warns(UserWarning, match="not finite"):
        watching.close_step(None, 1)
    path = tmp_path / "non_finite" / "step=1-rank=0.jsonl"
    path.write_text(spoil(path.read_text().splitlines(keepends=True), line, change))
    with pytest.raises(LockstepError, match=said) as error:
        read_rows(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{}\n", "no json\nat all\n"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(LockstepError, match=str(path)):
        read_rows(path)
    with pytest.raises(LockstepError, match="cannot read"):
        read_rows(tmp_path / "nothing.jsonl")


def test_chosen_rows_keep_their_order():
    rows = batch(row(0), row(1, tokens=3), row(2))
    found = recorded_rows(rows, logprobs(rows), [2, 0])
    assert [recorded.row.completion_ids for recorded in found] == [(20, 21), (0, 1)]
    assert [len(recorded.new_logprobs) for recorded in found] == [2, 2]


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    calls = []
    plain = distributed.all_reduce
    distributed.all_reduce = lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)
    watching = guard(Path(folder), max_consecutive_steps=2)
    decisions = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # a finite step; a NaN on rank 1 alone; a finite step; a gradient that is infinite everywhere; NaN on rank 0
        for step, (loss, norm) in enumerate([(0.5, 1.0), (math.nan if rank else 0.5, math.nan), (0.5, 1.0)], start=1):
            watch(watching, row(0), row(1), loss=loss)
            decisions.append(watching.close_step(torch.tensor(norm), step))
        watch(watching, row(0), row(1))
        decisions.append(watching.close_step(torch.tensor(math.inf), 4))
        watch(watching, row(0), row(1), loss=0.5 if rank else math.nan)
        try:
            watching.close_step(None, 5)
        except LockstepError as error:
            decisions.append(str(error).split()[0])
    results = {"decisions": decisions, "collectives": len(calls), "warnings": len(said), "state": watching.state_dict()}
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_ranks_decide_alike_and_each_writes_its_own_rows(tmp_path):
    on_ranks(run_rank, str(tmp_path))
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == {
            "decisions": [False, True, False, True, "2"],
            "collectives": 5,  # one a step
            "warnings": 2,
            "state": {"consecutive": 2, "skipped": 3},
        }
    assert sorted(path.name for path in (tmp_path / "non_finite").iterdir()) == [
        "step=2-rank=1.jsonl",
        "step=4-rank=0.jsonl",
        "step=4-rank=1.jsonl",
        "step=5-rank=0.jsonl",
    ]
