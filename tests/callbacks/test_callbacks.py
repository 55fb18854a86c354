import csv
import json
from types import SimpleNamespace

import pytest
import torch

from app.dashboard.row_table import append_csv
from app.data.collate import collate
from app.guards.worst_rows import WorstRow
from app.rollout.steps import RolloutReport, TrainStep
from app.training.timers import Timers
from app.types import Completion, Prompt, Sample, TrainRow
from callbacks.off_policy_mask import describe
from callbacks.run_summary import RunSummary, before_after_table
from callbacks.sample_logger import sample_table
from tests.callbacks.saves import Saves
from tests.conftest import tiny_tokenizer


def sample(text="12", prompt="5+7=", **rewards):
    return Sample(
        prompt=Prompt(row=0, prompt=prompt, token_ids=(4,), columns={}),
        completion=Completion(token_ids=(5, 1), logprobs=(-0.1, -0.2), finish_reason="stop"),
        text=text,
        rewards=rewards,
        reward=sum(value or 0.0 for value in rewards.values()),
    )


def step(ends_rollout):
    row = TrainRow.of_completion(prompt_ids=(1,), completion_ids=(2,), rollout_logprobs=None, advantage=0.0, reward=0.0)
    batch = collate([row], pad_token_id=0, ends_rollout=ends_rollout)
    return TrainStep(batch, None)


def test_the_table_shows_every_reward_and_escapes_what_markdown_reads():
    table = sample_table([sample("1|2\n3", exact=1.0, style=None)])
    head, rule, row = table.splitlines()
    assert head == "| prompt | completion | exact | style | reward | finish |"
    assert rule.count("---") == 6
    assert row == "| 5+7= | 1\\|2<br>3 | 1 | – | 1 | stop |"


def test_a_chat_prompt_is_shown_message_by_message():
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "5+7="}]
    assert "system: Add.<br>user: 5+7=" in sample_table([sample(prompt=messages, exact=1.0)])


def saved_steps(steps_per_rollout, total, every, should_stop_at=None):
    callback = Saves(every_n_train_steps=every)
    for done in range(1, total + 1):
        trainer = SimpleNamespace(global_step=done, max_steps=total, should_stop=done == should_stop_at)
        callback.on_train_batch_end(trainer, None, None, step(done % steps_per_rollout == 0), done - 1)
    return callback.steps


def test_checkpoints_fall_on_rollout_ends_and_on_the_last_step():
    assert saved_steps(steps_per_rollout=4, total=18, every=6) == [8, 16, 18]
    assert saved_steps(steps_per_rollout=1, total=6, every=3) == [3, 6]
    assert saved_steps(steps_per_rollout=4, total=18, every=100, should_stop_at=5) == [5, 18]


def test_the_summary_keeps_what_was_before_across_a_resume(tmp_path):
    first = RunSummary()
    first.before = {"val/exact_match": 0.25}
    state = first.state_dict()
    torch.save(state, tmp_path / "state.pt")
    resumed = RunSummary()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.after = {"val/exact_match": 0.75}
    path = resumed.write(tmp_path, steps=9, seed=3, seconds={"rollout": 1.23456}, syncs={"count": 4}, settings={})
    summary = json.loads(path.read_text())
    assert summary["before"] == {"val/exact_match": 0.25}
    assert summary["after"] == {"val/exact_match": 0.75}
    assert summary["seconds"] == {"rollout": 1.235}
    assert summary["versions"]["torch"] == torch.__version__  # with its build, e.g. +cu130
    assert (summary["steps"], summary["seed"]) == (9, 3)
    assert summary["weight_syncs"] == {"count": 4}


def test_the_summary_holds_the_first_and_the_latest_training_reward():
    summary = RunSummary()
    for reward in (None, 0.25, 0.5, 0.75):
        metrics = {} if reward is None else {"rollout/reward_mean": torch.tensor(reward)}
        summary.on_train_batch_start(SimpleNamespace(callback_metrics=metrics), None, None, 0)
    assert summary.before == {"rollout/reward_mean": 0.25}
    assert summary.after == {"rollout/reward_mean": 0.75}


def test_the_table_aligns_and_marks_what_is_missing():
    assert before_after_table({"val/a": 0.5}, {"val/a": 1.0, "val/long": 2.0}).splitlines() == [
        "            before     after",
        "val/a        0.500     1.000",
        "val/long         –     2.000",
    ]


def test_timers_report_the_interval_and_keep_the_total():
    timers = Timers()
    timers.add("rollout", 2.0)
    timers.add("update", 2.0)
    timers.add_tokens(100)
    assert timers.read() == pytest.approx(
        {"time/rollout": 2.0, "time/scoring": 0.0, "time/update": 2.0, "time/sync": 0.0, "time/tokens_per_second": 25.0}
    )
    timers.add("sync", 1.0)
    assert timers.read()["time/rollout"] == 0.0
    assert dict(timers.total) == {"rollout": 2.0, "update": 2.0, "sync": 1.0}


def test_a_step_passes_lightnings_walkers_untouched():
    """DeepSpeed's precision plugin and the device move use these two; a rounded log-probability would go unseen."""
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, move_data_to_device
    from lightning_utilities.core.apply_func import apply_to_collection

    original = step(True)
    assert apply_to_collection(original, torch.Tensor, lambda tensor: tensor.bfloat16()) is original
    assert convert_tensors_to_scalars(original) is original
    moved = move_data_to_device(original, torch.device("cpu"))
    assert moved.batch.advantages.dtype == torch.float32
    report = RolloutReport(
        samples=(),
        groups=0,
        zero_std_groups=0,
        resampled_groups=0,
        overlong_rows=0,
        low_entropy_tokens=0,
        reward_penalty=None,
        rollout_seconds=0.0,
        scoring_seconds=0.0,
    )
    assert move_data_to_device(TrainStep(original.batch, report), torch.device("cpu")).report is report


def test_a_dropped_row_says_why_in_words_and_the_file_has_one_header(tmp_path):
    tokenizer = tiny_tokenizer()
    row = WorstRow(
        step=7,
        rank=1,
        score=0.3,
        differences=(0.1, 0.5),
        row=TrainRow.of_completion(
            tokenizer.encode("5+7="), tokenizer.encode("13"), rollout_logprobs=None, advantage=-1.25, reward=0.0
        ),
    )
    table = describe(row, 0.2, tokenizer)
    assert table["why"] == "drift 0.3 > 0.2 and advantage -1.25 < 0"
    assert table["tokens that drifted most (nats)"] == "'3' +0.5, '1' +0.1"
    assert table["prompt"].replace(" ", "") == "5+7="
    for _ in range(2):
        append_csv(tmp_path / "new" / "rows.csv", [table])
    with (tmp_path / "new" / "rows.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [table, table]
