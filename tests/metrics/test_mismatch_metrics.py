"""The collection equals the function on the concatenation, however the rows are split; its state is durable."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.maths import tiling
from app.maths.correction import PRESETS, Correction, CorrectionConfig, RejectionRule, correct
from app.metrics import MismatchMetrics, RunningStatistics, diagnose, table
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
    assert_same(metrics.compute(), diagnose(**data, config=CONFIG))


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs()
    whole = diagnose(**data, config=CONFIG)

    monkeypatch.setattr(tiling, "TILE_TOKENS", 1)
    assert_same(diagnose(**data, config=CONFIG), whole)


def test_forward_gives_the_batch_and_accumulates(filled: MismatchMetrics) -> None:
    rest = part(inputs(), slice(9, COUNT))
    assert_same(filled(**rest), diagnose(**rest, config=CONFIG))
    assert_same(filled.compute(), diagnose(**inputs(), config=CONFIG))


def test_reset(filled: MismatchMetrics) -> None:
    filled.reset()
    rest = part(inputs(), slice(9, COUNT))
    filled.update(**rest)
    assert_same(filled.compute(), diagnose(**rest, config=CONFIG))


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
    assert_same(resumed.compute(), diagnose(**inputs(), config=CONFIG))


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
    for metric in filled.members():
        metric._computed = None
        assert metric.vector.dtype == torch.float64
    assert filled.compute() == before


def test_survives_copy_and_pickle(filled: MismatchMetrics) -> None:
    assert copy.deepcopy(filled).compute() == filled.compute()
    assert pickle.loads(pickle.dumps(filled)).compute() == filled.compute()


def test_gradients_are_left_alone() -> None:
    old, rollout, mask = make_rows(seed=1)
    old.requires_grad_()
    metrics = MismatchMetrics(CONFIG)
    metrics.update(old, rollout, mask)
    assert not any(member.vector.requires_grad for member in metrics.members())


DETAILED = {spec.key for spec in table.SPECS if spec.when == "detailed"}


def is_detailed(key: str) -> bool:
    return key.removeprefix(KEY) in DETAILED or "at_position" in key


@pytest.mark.parametrize("details", [(True, False, True), (False, True, False), (False, False, False)])
def test_core_and_detailed_updates_mix_exactly(details: tuple[bool, bool, bool]) -> None:
    """Core keys over all rows, detailed keys over the rows of detailed updates."""
    data, parts = inputs(), (slice(0, 4), slice(4, 11), slice(11, COUNT))
    metrics = MismatchMetrics(CONFIG)
    for rows, detailed in zip(parts, details, strict=True):
        metrics.update(**part(data, rows), detailed=detailed)
    everything = diagnose(**data, config=CONFIG)
    wanted = {key: value for key, value in everything.items() if not is_detailed(key)}
    if any(details):
        index = torch.cat(
            [torch.arange(COUNT)[rows] for rows, detailed in zip(parts, details, strict=True) if detailed]
        )
        picked = diagnose(**{name: value[index] for name, value in data.items()}, config=CONFIG)
        wanted |= {key: value for key, value in picked.items() if is_detailed(key)}
    assert_same(metrics.compute(), wanted)


def test_the_core_is_what_the_design_names() -> None:
    metrics = MismatchMetrics(CONFIG)
    metrics.update(**inputs(), detailed=False)
    assert {key.removeprefix(KEY) for key in metrics.compute()} == {
        *("kl", "k3_kl", "chi2_token", "ess", "ess_exact", "policy_lag"),
        *("is_weight_mean", "is_weight_std", "is_weight_max", "is_weight_min"),
        *("raw_ratio_mean", "raw_ratio_std", "raw_ratio_max"),
        *("clipped_frac", "clipped_frac_high", "clipped_frac_low"),
        *("rejected_token_fraction", "rejected_sequence_fraction", "veto_fraction"),
        *("off_policy_sequence_fraction", "off_policy_sequence_fraction_negative"),
        *("logprob_abs_diff_mean", "logprob_abs_diff_max"),
        *("missing_logprob_fraction", "nonfinite_logprob_fraction"),
    }
    assert metrics.histograms() == {}


def corrected_as(data: dict, config: CorrectionConfig) -> Correction:
    """What a correction makes of rows, in float64 as `diagnose` computes it."""
    return correct(data["old_logprobs"].double(), data["rollout_logprobs"].double(), data["mask"], config)


def test_a_correction_that_was_computed_is_measured_and_not_computed_again() -> None:
    data = inputs()
    metrics = MismatchMetrics()
    metrics.update(**data, correction=corrected_as(data, CONFIG))
    assert_same(metrics.compute(), diagnose(**data, config=CONFIG))
    doubled = dataclasses.replace(corrected_as(data, CONFIG), controlled=2 * corrected_as(data, CONFIG).controlled)
    once, twice = MismatchMetrics(), MismatchMetrics(CONFIG)
    once.update(**data, correction=doubled)
    twice.update(**data)
    key = KEY + "is_weight_mean"
    assert once.compute()[key] == pytest.approx(2 * twice.compute()[key], rel=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_weights_and_masks_that_the_loss_used_are_what_is_measured(name: str) -> None:
    """By a loop over the tokens of a Correction, in the float32 of training."""
    data, config = inputs(), PRESETS[name]
    data["rollout_logprobs"][:3] = data["old_logprobs"][:3] + 1e-4  # or the tightest masks would leave nothing
    used = correct(data["old_logprobs"].float(), data["rollout_logprobs"].float(), data["mask"], config)
    metrics = MismatchMetrics()
    metrics.update(**data, correction=used)
    found = metrics.compute()
    places = [(i, t) for i, t in data["mask"].nonzero().tolist() if data["rollout_logprobs"][i, t].isfinite()]
    if config.level != "none":
        weights = [float(used.is_weights[i, t]) * float(used.normalizer) for i, t in places]
        mean = math.fsum(weights) / len(weights)
        assert found[KEY + "is_weight_mean"] == pytest.approx(mean, rel=1e-6)
        assert found[KEY + "is_weight_max"] == pytest.approx(max(weights), rel=1e-6)
        assert found[KEY + "is_weight_min"] == pytest.approx(min(weights), rel=1e-6, abs=1e-12)
        kish = math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight**2 for weight in weights))
        assert found[KEY + "ess_exact"] == pytest.approx(kish, rel=1e-6)
    valid = int(data["mask"].sum())
    assert found[KEY + "rejected_token_fraction"] == (valid - int(used.mask.sum())) / valid
    filled = data["mask"].any(1)
    lost = int((filled & ~used.mask.any(1)).sum())
    assert found[KEY + "rejected_sequence_fraction"] == lost / int(filled.sum())


def test_corrected_and_uncorrected_rows_in_one_interval() -> None:
    """Clipping and rejection are shares of the corrected rows; means weigh both kinds by their tokens."""
    data = inputs()
    first, second = part(data, slice(0, 6)), part(data, slice(6, COUNT))
    metrics = MismatchMetrics()
    metrics.update(**first, correction=corrected_as(first, CONFIG))
    metrics.update(**second)
    found, corrected, raw = metrics.compute(), diagnose(**first, config=CONFIG), diagnose(**second)
    for key in ("clipped_frac", "clipped_frac_high", "rejected_token_fraction", "veto_fraction"):
        assert found[KEY + key] == corrected[KEY + key]
    tokens = [int((rows["mask"] & rows["rollout_logprobs"].isfinite()).sum()) for rows in (first, second)]
    weighted = corrected[KEY + "is_weight_mean"] * tokens[0] + raw[KEY + "is_weight_mean"] * tokens[1]
    assert found[KEY + "is_weight_mean"] == pytest.approx(weighted / sum(tokens), rel=1e-12)
    assert found[KEY + "is_weight_max"] == max(corrected[KEY + "is_weight_max"], raw[KEY + "is_weight_max"])
