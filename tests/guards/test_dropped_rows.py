import torch

from app.data.collate import collate
from app.guards.dropped_rows import DroppedReport, DroppedRows
from app.types import TrainRow


def batch(advantages):
    rows = [
        TrainRow.of_completion(
            prompt_ids=(1, 2),
            completion_ids=tuple(range(10 * i, 10 * i + i + 1)),
            rollout_logprobs=(-0.5,) * (i + 1),
            advantage=advantage,
            reward=advantage + 1,
        )
        for i, advantage in enumerate(advantages)
    ]
    return collate(rows, pad_token_id=0)


def add(log, advantages, drifts, step=3, rank=0):
    rows = batch(advantages)
    drift = torch.tensor(drifts)
    keep = ~((drift > 0.5) & (rows.advantages < 0))
    log.add(rows, keep, drift, drift[:, None] * rows.mask, step=step, rank=rank)


def test_counts_and_the_worst_row_with_its_tokens():
    log = DroppedRows(delta=0.5, limit=1)
    add(log, advantages=[-1.0, 1.0, -1.0, -1.0], drifts=[0.6, 0.9, 0.4, 0.75])
    report = log.take()
    assert (report.rows, report.negative, report.dropped, report.spared) == (4, 3, 2, 1)
    assert report.drift_max == torch.tensor(0.9).item()
    (row,) = report.worst
    assert row.row.prompt_ids == (1, 2)
    assert row.row.sampled_ids == (30, 31, 32, 33)
    assert row.differences == (0.75,) * 4
    assert (row.step, row.score, row.row.reward, row.row.advantage) == (3, 0.75, 0.0, -1.0)


def test_an_interval_is_the_sum_of_its_micro_batches_and_ranks():
    first, second, both = (DroppedRows(delta=0.5, limit=2) for _ in range(3))
    for log in (first, both):
        add(log, [-1.0, -1.0], [0.6, 0.8], rank=0)
    for log in (second, both):
        add(log, [-1.0, 1.0], [0.7, 0.8], rank=1)
    merged = DroppedReport.merged([first.take(), second.take()], limit=2)
    assert merged == both.take()
    assert [row.rank for row in merged.worst] == [0, 1]
    assert both.take().rows == 0  # a new interval begins


def test_numbers_only():
    log = DroppedRows(delta=0.5, limit=0)
    add(log, [-1.0, 1.0], [0.7, 0.8])
    report = log.take()
    assert (report.dropped, report.spared, report.worst) == (1, 1, ())
