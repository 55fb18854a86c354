"""The collection equals the function on the concatenation, however the rows are split; its state is durable."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.maths.correction import CorrectionConfig, RejectionRule
from app.metrics import MismatchMetrics, RunningStatistics, diagnose
from app.metrics.measure import Rows
from app.metrics.mismatch import MismatchMetric
from tests.metrics.reference import KEY, assert_same, make_rows

CONFIG = CorrectionConfig(
    level="token",
    control="mask",
    lower=0.7,
    upper=1.4,
    veto_high=3.0,
    rejection=(RejectionRule(level="geometric", upper=1.05),),
)
COUNT, WIDTH = 16, 23


def inputs(width: int = WIDTH) -> dict[str, Tensor]:
    old, rollout, mask = make_rows(seed=11, count=COUNT, width=width)
    generator = torch.Generator().manual_seed(12)
    rollout[3, 0] = torch.nan
    return {
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "mask": mask,
        "rewards": torch.rand(COUNT, generator=generator),
        "advantages": torch.randn(COUNT, generator=generator),
        "off_policy_keep": torch.rand(COUNT, generator=generator) > 0.4,
        "policy_lag": torch.arange(COUNT) % 3,
    }


def part(data: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Some rows, without the padding that only longer rows of the batch need."""
    picked = {name: value[rows] for name, value in data.items()}
    width = max(1, int(picked["mask"].sum(1).max()))
    return {name: value[:, :width] if value.dim() == 2 else value for name, value in picked.items()}


def without_positions(found: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in found.items() if "at_position" not in key}


@pytest.fixture
def filled() -> MismatchMetrics:
    metrics = MismatchMetrics(CONFIG)
    metrics.update(**part(inputs(), slice(0, 9)))
    return metrics


@pytest.mark.parametrize("pieces", [1, 2, 4, 16])
def test_micro_batches(pieces: int) -> None:
    data = inputs()
    metrics = MismatchMetrics(CONFIG)
    step = COUNT // pieces
    for start in range(0, COUNT, step):
        metrics.update(**part(data, slice(start, start + step)))
    whole = MismatchMetrics(CONFIG)
    whole.update(**data)
    assert_same(metrics.compute(), whole.compute())
    assert_same(without_positions(metrics.compute()), diagnose(**data, config=CONFIG))


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs()
    whole = diagnose(**data, config=CONFIG)

    def row_by_row(self: Rows) -> Iterator[Rows]:
        for i in range(COUNT):
            yield Rows(**{name: value[i : i + 1] for name, value in vars(self).items()})

    monkeypatch.setattr(Rows, "tiles", row_by_row)
    assert_same(diagnose(**data, config=CONFIG), whole)


def test_tiles_cover_all_rows_in_order() -> None:
    old, rollout, mask = make_rows(seed=0, count=9, width=1 << 14)
    tiles = list(Rows(old_logprobs=old, rollout_logprobs=rollout, mask=mask).tiles())
    assert [len(tile.mask) for tile in tiles] == [4, 4, 1]
    assert torch.equal(torch.cat([tile.old_logprobs for tile in tiles]), old)


def test_forward_gives_the_batch_and_accumulates(filled: MismatchMetrics) -> None:
    rest = part(inputs(), slice(9, COUNT))
    assert_same(without_positions(filled(**rest)), diagnose(**rest, config=CONFIG))
    assert_same(without_positions(filled.compute()), diagnose(**inputs(), config=CONFIG))


def test_reset(filled: MismatchMetrics) -> None:
    filled.reset()
    rest = part(inputs(), slice(9, COUNT))
    filled.update(**rest)
    assert_same(without_positions(filled.compute()), diagnose(**rest, config=CONFIG))


@pytest.mark.filterwarnings("error")
def test_window_crosses_a_checkpoint(filled: MismatchMetrics, tmp_path: Path) -> None:
    filled.compute()
    torch.save(filled.state_dict(), tmp_path / "state.pt")
    resumed = MismatchMetrics(CONFIG)
    resumed.update(**part(inputs(), slice(0, 1)))
    resumed.compute()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.compute() == filled.compute()
    resumed.update(**part(inputs(), slice(9, COUNT)))
    assert_same(without_positions(resumed.compute()), diagnose(**inputs(), config=CONFIG))


def test_state_of_other_settings_is_refused() -> None:
    saved = RunningStatistics(ratios=["a", "b"]).state_dict()
    with pytest.raises(ValueError, match=r"vector: the saved state has 4 entries, this RunningStatistics has 2"):
        RunningStatistics(ratios=["a"]).load_state_dict(saved)


CASTS: list[Callable[[torch.nn.Module], torch.nn.Module]] = [
    lambda module: module.to(torch.bfloat16),
    lambda module: module.bfloat16(),
    lambda module: module.float(),
]


@pytest.mark.parametrize("cast", CASTS)
def test_casts_of_the_module_around_it_do_not_reach_the_state(
    filled: MismatchMetrics, cast: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    before = filled.compute()
    module = torch.nn.Module()
    module.metrics, module.layer = filled, torch.nn.Linear(2, 2, dtype=torch.float64)
    cast(module)
    assert module.layer.weight.dtype != torch.float64
    for metric in filled.values():
        metric._computed = None
        assert metric.vector.dtype == torch.float64
    assert filled.compute() == before


def test_survives_copy_and_pickle(filled: MismatchMetrics) -> None:
    assert copy.deepcopy(filled).compute() == filled.compute()
    assert pickle.loads(pickle.dumps(filled)).compute() == filled.compute()


def test_one_gather_a_metric() -> None:
    gathered: list[torch.Size] = []

    def gather(tensor: Tensor, group: object = None) -> list[Tensor]:
        gathered.append(tensor.shape)
        return [tensor, tensor]

    metric = MismatchMetric(CONFIG)
    metric.dist_sync_fn, metric.distributed_available_fn = gather, lambda: True
    data = inputs()
    metric.update(**data)
    doubled = {name: torch.cat([value, value]) for name, value in data.items()}
    assert_same({KEY + key: value for key, value in metric.compute().items()}, diagnose(**doubled, config=CONFIG))
    assert len(gathered) == 1


def test_gradients_are_left_alone() -> None:
    old, rollout, mask = make_rows(seed=1)
    old.requires_grad_()
    metrics = MismatchMetrics(CONFIG)
    metrics.update(old, rollout, mask)
    assert not metrics["MismatchMetric"].vector.requires_grad
