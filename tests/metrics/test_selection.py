"""Tokens that do not count are 0 in the sums, not packed away: nothing of them may show, no extreme may be theirs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from app.maths import tiling
from app.maths.correction import CorrectionConfig, RejectionRule
from app.metrics import MismatchMetrics, diagnose
from tests.metrics.reference import KEY, assert_close, assert_same, expected

BOUNDS: list[dict[str, Any]] = [
    {"upper": 2.0},
    {"upper": 0.9},
    {"lower": 0.5, "upper": 0.8},
    {"lower": 1.1, "upper": 1.4},
    {"upper": 1e6},
]
CONFIGS = [
    None,
    CorrectionConfig(),
    *(
        CorrectionConfig(level=level, control=control, **bounds)
        for level in ("token", "sequence", "geometric")
        for control in ("truncate", "mask")
        for bounds in BOUNDS
    ),
    CorrectionConfig(level="token", bound_level="geometric", control="mask", lower=0.9, upper=1.1),
    CorrectionConfig(level="geometric", bound_level="token", control="mask", lower=0.9, upper=1.1),
]
LENGTHS = {"ragged": [9, 1, 0, 5, 8, 2], "whole": [9] * 6, "one row": [0, 0, 2, 0, 0, 0]}


def named(config: CorrectionConfig | None) -> str:
    if config is None:
        return "none"
    return f"{config.level}-{config.bound_level}-{config.control}-{config.lower}-{config.upper}"


def rows(lengths: list[int], shift: float, noise: float = 0.02) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of log-ratios about `shift`; the last rows of a tile have another length than the first."""
    generator = torch.Generator().manual_seed(0)
    rollout = -1 - torch.rand(len(lengths), 9, generator=generator, dtype=torch.float64)
    gap = shift + noise * torch.randn(len(lengths), 9, generator=generator, dtype=torch.float64)
    return rollout + gap, rollout, torch.arange(9) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("config", CONFIGS, ids=named)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shift", [0.0, -0.3, 0.3])
def test_extremes_and_sums_are_those_of_the_counted_tokens(
    config: CorrectionConfig | None, lengths: str, shift: float
) -> None:
    """At -0.3 every ratio is below 1 and at 0.3 above it: a masked 1 would be the largest, or the smallest."""
    old, rollout, mask = rows(LENGTHS[lengths], shift)
    assert_close(diagnose(old, rollout, mask, config), expected(old, rollout, mask, config))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -1e10, 30.0])
@pytest.mark.parametrize("config", [None, CONFIGS[2], CONFIGS[3], CONFIGS[-1]], ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [1, 1 << 16])
def test_nothing_under_the_mask_shows(
    poison: float, config: CorrectionConfig | None, dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "TILE_TOKENS", tile)
    old, rollout, mask = rows(LENGTHS["ragged"], 0.1)
    mask[0, 3] = mask[4, 0] = False  # holes: padding is not only at the end
    wanted = diagnose(old.to(dtype), rollout.to(dtype), mask, config)
    bad_old, bad_rollout = (values.masked_fill(~mask, poison).to(dtype) for values in (old, rollout))
    assert diagnose(bad_old, rollout.to(dtype), mask, config) == wanted
    assert diagnose(old.to(dtype), bad_rollout, mask, config) == wanted


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_tokens_that_do_not_count_are_left_out_of_all_but_the_decisions(config: CorrectionConfig | None) -> None:
    """Missing and infinite values at valid places of one tile, in rows with other tokens and in a row of its own."""
    old, rollout, mask = rows([9, 3, 1, 5, 8, 2], -0.1)
    rollout[0, 8], rollout[2, 0], old[3, 4], old[4, 7] = math.nan, math.nan, math.inf, math.nan
    counted = mask & (old - rollout).isfinite()
    found = diagnose(old, rollout, mask, config)
    if config is None or config.bound_level in (None, config.level) == (config.level == "token"):
        wanted = diagnose(old, rollout, counted, config)
        wanted |= {KEY + "missing_logprob_fraction": 2 / 28, KEY + "nonfinite_logprob_fraction": 2 / 28}
        assert_same(found, wanted)
    assert all(math.isfinite(value) for value in found.values())


def test_decisions_see_tokens_that_do_not_count() -> None:
    """A row with an infinite log-ratio is vetoed, and one with only a missing token is judged as a match."""
    old = torch.tensor([[-1.0, -1.0], [-1.0, -9.0], [-1.0, -1.0]])
    rollout = torch.tensor([[-1.0, -math.inf], [math.nan, -9.0], [-1.0, -1.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rule = RejectionRule(level="geometric", lower=0.9, upper=1.1)
    found = diagnose(old, rollout, mask, CorrectionConfig(rejection=(rule,), veto_high=10.0))
    assert found[KEY + "veto_fraction"] == 1 / 3
    assert found[KEY + "rejected_sequence_fraction"] == 1 / 3
    assert found[KEY + "rejected_token_fraction"] == 2 / 5
    assert found[KEY + "missing_logprob_fraction"] == found[KEY + "nonfinite_logprob_fraction"] == 1 / 5
    assert found[KEY + "is_weight_max"] == found[KEY + "is_weight_min"] == 1.0


@pytest.mark.parametrize("far", [25.0, -25.0, -900.0])
def test_a_clamped_log_ratio_does_not_spoil_the_probabilities(far: float) -> None:
    """One token beyond the clamp sends its tile the other way, with the same values for the rest."""
    old, rollout, mask = rows(LENGTHS["ragged"], 0.0)
    old[0, 0] = rollout[0, 0] + far if far < 0 else -0.5
    rollout[0, 0] = rollout[0, 0] if far < 0 else -0.5 - far
    assert_close(diagnose(old, rollout, mask), expected(old, rollout, mask, None))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_histograms_count_the_counted_tokens(lengths: str) -> None:
    old, rollout, mask = rows(LENGTHS[lengths], -0.3)
    rollout[:, 0] = math.nan
    counted = mask & rollout.isfinite()
    metrics = MismatchMetrics(CorrectionConfig(level="token", upper=0.9))
    metrics.update(old, rollout, mask)
    drawn = metrics.histograms()
    if not counted.any():
        assert drawn == {}
        return
    for found in drawn.values():
        assert found.total == sum(found.counts) == int(counted.sum())
    assert drawn[KEY + "log_ratio"].maximum < 0
    assert drawn[KEY + "is_weight"].maximum < 1


def test_nothing_counts_though_tokens_are_valid() -> None:
    old, rollout, mask = rows(LENGTHS["ragged"], 0.0)
    for config in CONFIGS:
        found = diagnose(old, torch.full_like(rollout, math.nan), mask, config)
        assert found.pop(KEY + "missing_logprob_fraction") == 1.0
        assert set(found.values()) <= {0.0}
        assert KEY + "is_weight_max" not in found
        assert KEY + "logprob_abs_diff_max" not in found
