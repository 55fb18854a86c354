"""The correction against hand-worked rows, identities and theory; the peers' numbers are in test_correction_peers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from app.maths import tiling
from app.maths.correction import (
    Correction,
    CorrectionConfig,
    RejectionRule,
    correct,
    mean_weight,
    preset,
    weight_sums,
)
from app.maths.correction.control import beyond_bounds
from app.maths.correction.ratios import Ratios
from app.maths.correction.rejection import kept_tokens

NAN, INF = math.nan, math.inf


def valid(ratios: list[list[float]]) -> Tensor:
    """The mask of rows of ratios, in which 0 stands for a masked position."""
    return torch.tensor(ratios) > 0


def decide(ratios: list[list[float]]) -> Ratios:
    """What a tile is decided by, for rows of given token ratios train / rollout."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    return Ratios(torch.where(ratio > 0, ratio, 1).log(), ratio > 0)


def run(ratios: list[list[float]], config: CorrectionConfig, **options) -> Correction:
    """Correct rows of given token ratios train / rollout; at masked positions stands poison."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    mask = ratio > 0
    rollout = torch.where(mask, 0.0, NAN).double()  # at 0 the log-ratio has no rounding, and equality can be tested
    old = torch.where(mask, torch.where(mask, ratio, 1).log(), INF)
    return correct(old, rollout, mask, config, **options)


def assert_rows(actual: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


ROWS = [[2.0, 0.5, 4.0], [0.25, 1.0, 0.0], [0.0, 0.0, 0.0]]  # products 4 and 1/4; geometric means 4^(1/3) and 1/2


@pytest.mark.parametrize(
    ("level", "ratio"),
    [
        ("token", [[2.0, 0.5, 4.0], [0.25, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ("sequence", [[4.0, 4.0, 4.0], [0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]),
        ("geometric", [[4 ** (1 / 3)] * 3, [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_levels(level, ratio) -> None:
    correction = run(ROWS, CorrectionConfig(level=level, upper=100.0))
    assert_rows(decide(ROWS).at(level) * valid(ROWS), ratio)
    assert_rows(correction.is_weights, ratio)
    assert correction.mask.tolist() == (torch.tensor(ROWS) > 0).tolist()


def test_truncate_clamps_at_both_bounds() -> None:
    config = CorrectionConfig(level="token", lower=0.4, upper=3.0)
    assert_rows(run(ROWS, config).is_weights, [[2.0, 0.5, 3.0], [0.4, 1.0, 0.0], [0.0, 0.0, 0.0]])
    high, low = beyond_bounds(decide(ROWS), config)
    assert high is not None
    assert low is not None
    assert high.int().tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert low.int().tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_mask_zeroes_outside_and_keeps_equality() -> None:
    correction = run(ROWS, CorrectionConfig(level="token", control="mask", lower=0.5, upper=2.0))
    assert_rows(correction.is_weights, [[2.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


def test_bound_level_tests_one_ratio_and_weighs_with_another() -> None:
    config = CorrectionConfig(level="token", bound_level="geometric", control="mask", upper=1.0)
    assert_rows(run(ROWS, config).is_weights, [[0.0, 0.0, 0.0], [0.25, 1.0, 0.0], [0.0, 0.0, 0.0]])
    high, low = beyond_bounds(decide(ROWS), config)
    assert high is not None
    assert high.tolist() == [[True], [False], [False]]
    assert low is None


def test_level_none_weighs_one_and_still_measures() -> None:
    correction = run(ROWS, CorrectionConfig())
    assert_rows(correction.is_weights, [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert correction.mask.tolist() == valid(ROWS).tolist()


CONTROLS = [
    CorrectionConfig(level=level, bound_level=bound, control=control, **bounds)
    for level in ("token", "sequence", "geometric")
    for control in ("truncate", "mask")
    for bound in ((None, "token", "geometric") if control == "mask" else (None,))
    for bounds in ({"upper": 2.0}, {"upper": 0.5}, {"lower": 0.4, "upper": 3.0}, {"lower": 1.5, "upper": 3.0})
]


def test_ratios_less_one_are_the_ratios_less_one() -> None:
    log_ratio = torch.tensor([[0.93, 0.3, 4.1], [0.24, 1.07, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    plain, shifted = Ratios(log_ratio, mask), Ratios(log_ratio, mask, shift=1)
    for level in ("token", "sequence", "geometric"):
        torch.testing.assert_close(shifted.at(level) + 1, plain.at(level), rtol=0, atol=1e-15)
    torch.testing.assert_close(shifted.k3, plain.k3, rtol=1e-12, atol=0)


@pytest.mark.parametrize("config", [*CONTROLS, CorrectionConfig()])
def test_what_is_measured_is_what_is_used(config) -> None:
    used, measured = run(ROWS, config), run(ROWS, dataclasses.replace(config, log_only=True))
    assert torch.equal(used.controlled, used.is_weights)
    assert torch.equal(used.kept, used.mask)
    assert torch.equal(measured.controlled, used.is_weights)
    assert torch.equal(measured.is_weights, valid(ROWS).double())
    for bound, beyond in ((config.upper, used.above), (config.lower, used.below)):
        assert (bound is None) is (beyond is None)
        assert beyond is None or not (beyond & ~valid(ROWS)).any()


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (RejectionRule(level="token", lower=0.5, upper=2.0), [[1, 1, 0], [0, 1, 0]]),
        (RejectionRule(level="sequence", upper=3.9), [[0, 0, 0], [1, 1, 0]]),
        (RejectionRule(level="sequence", lower=0.26), [[1, 1, 1], [0, 0, 0]]),
        (RejectionRule(level="geometric", lower=0.51), [[1, 1, 1], [0, 0, 0]]),
        (RejectionRule(level="geometric", upper=1.5), [[0, 0, 0], [1, 1, 0]]),
        (RejectionRule(level="max", upper=3.9), [[0, 0, 0], [1, 1, 0]]),
        (RejectionRule(level="max", lower=0.3), [[1, 1, 1], [0, 0, 0]]),
        # with L = log 2, k2 is L^2 / 2 * [1, 1, 4] and L^2 / 2 * [4, 0]: sums 1.441 and 0.961, means 0.480 and 0.480
        (RejectionRule(level="token", statistic="k2", upper=0.5), [[1, 1, 0], [0, 1, 0]]),
        (RejectionRule(level="sequence", statistic="k2", upper=1.0), [[0, 0, 0], [1, 1, 0]]),
        (RejectionRule(level="max", statistic="k2", upper=0.9), [[0, 0, 0], [0, 0, 0]]),
        # k3 is r - 1 - log r: [0.307, 0.193, 1.614] and [0.636, 0]: means 0.705 and 0.318
        (RejectionRule(level="geometric", statistic="k3", upper=0.5), [[0, 0, 0], [1, 1, 0]]),
        (RejectionRule(level="sequence", statistic="k3", upper=2.2), [[1, 1, 1], [1, 1, 0]]),
        (RejectionRule(level="max", statistic="k3", upper=0.64), [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_rejection_rules(rule, kept) -> None:
    correction = run(ROWS[:2], CorrectionConfig(level="token", upper=100.0, rejection=(rule,)))
    assert correction.mask.int().tolist() == kept
    assert_rows(correction.is_weights, ROWS[:2])


def test_rules_are_anded() -> None:
    rules = [RejectionRule(level="token", upper=2.0), RejectionRule(level="geometric", lower=0.6)]
    assert run(ROWS, CorrectionConfig(rejection=rules)).mask.int().tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("low", "high", "vetoed"),
    [(0.3, None, [0, 1, 0]), (None, 3.0, [1, 0, 0]), (0.25, 4.0, [0, 0, 0]), (0.3, 3.0, [1, 1, 0])],
)
def test_veto_drops_whole_rows_and_no_weight(low, high, vetoed) -> None:
    config = CorrectionConfig(veto_low=low, veto_high=high)
    assert kept_tokens(decide(ROWS), config)[1].int().tolist() == vetoed
    correction = run(ROWS, config)
    assert torch.equal(correction.mask, valid(ROWS) & ~torch.tensor(vetoed).bool()[:, None])
    assert torch.equal(correction.is_weights, valid(ROWS).double())


def test_veto_sees_beyond_the_clamp() -> None:
    correction = run([[math.exp(-25.0), 1.0], [math.exp(-21.0), 1.0]], CorrectionConfig(veto_low=math.exp(-23.0)))
    assert correction.mask.tolist() == [[False, False], [True, True]]


def test_clamps_token_values_and_the_sum_of_a_sequence() -> None:
    row = [[math.exp(30.0), math.exp(-25.0)]]
    assert_rows(run(row, CorrectionConfig(level="token", upper=1e9)).is_weights, [[math.exp(20.0), math.exp(-20.0)]])
    assert_rows(run(row, CorrectionConfig(level="sequence", upper=1e9)).is_weights, [[math.exp(5.0)] * 2])
    assert_rows(run(row, CorrectionConfig(level="geometric", upper=1e9)).is_weights, [[1.0, 1.0]])
    high = run([[math.exp(15.0), math.exp(15.0)]], CorrectionConfig(level="sequence", upper=1e9))
    assert_rows(high.is_weights, [[math.exp(20.0)] * 2])


def test_a_missing_token_has_ratio_one() -> None:
    old = torch.tensor([[-1.0, -1.0, NAN]])
    rollout = torch.tensor([[NAN, -1.5, NAN]])
    mask = torch.tensor([[True, True, False]])
    correction = correct(old, rollout, mask, CorrectionConfig(level="token", upper=2.0))
    assert correction.is_weights.tolist() == [[1.0, pytest.approx(math.exp(0.5)), 0.0]]
    row = correct(old, rollout, mask, CorrectionConfig(level="geometric", upper=2.0))
    assert row.is_weights.tolist() == [[pytest.approx(math.exp(0.25))] * 2 + [0.0]]  # (0 + 0.5) / 2


def test_batch_normalize_by_token_and_by_row() -> None:
    token = run(ROWS, CorrectionConfig(level="token", upper=2.5, batch_normalize=True))
    assert token.normalizer.item() == pytest.approx((2 + 0.5 + 2.5 + 0.25 + 1) / 5)
    assert token.is_weights[valid(ROWS)].mean().item() == pytest.approx(1.0)
    row = run(ROWS, CorrectionConfig(level="sequence", upper=3.0, batch_normalize=True))
    assert row.normalizer.item() == pytest.approx((3 + 0.25) / 2)
    assert_rows(row.is_weights, [[3 / 1.625] * 3, [0.25 / 1.625] * 2 + [0.0], [0.0] * 3])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_batch_normalize_over_micro_batches_equals_all_rows_at_once(level) -> None:
    config = CorrectionConfig(level=level, upper=3.0, batch_normalize=True)
    together = run(ROWS, config)
    parts = [run([row], config, normalizer=1.0) for row in ROWS]
    mean = mean_weight(
        sum(weight_sums(part.is_weights, valid([row]), config) for part, row in zip(parts, ROWS, strict=True))
    )
    assert mean.item() == pytest.approx(together.normalizer.item(), rel=1e-12)
    apart = [run([row], config, normalizer=mean) for row in ROWS]
    torch.testing.assert_close(torch.cat([part.is_weights for part in apart]), together.is_weights, rtol=1e-12, atol=0)
    assert all(part.normalizer.item() == mean.item() for part in apart)


@pytest.mark.parametrize(
    ("settings", "sums"),
    [
        ({"level": "token"}, [2 + 0.5 + 4 + 0.25 + 1, 5]),
        ({"level": "sequence"}, [4 + 0.25, 2]),
        ({"level": "geometric"}, [4 ** (1 / 3) + 0.5, 2]),
        ({"level": "token", "control": "mask", "bound_level": "geometric"}, [2 + 0.5 + 4 + 0.25 + 1, 5]),
    ],
)
def test_weight_sums_count_tokens_or_rows(settings, sums) -> None:
    config = CorrectionConfig(**settings, upper=100.0, batch_normalize=True)
    part = run(ROWS, config, normalizer=1.0)
    found = weight_sums(part.is_weights, valid(ROWS), config)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(sums)
    assert mean_weight(found).item() == pytest.approx(sums[0] / sums[1])


def test_the_mean_of_no_weights_is_one() -> None:
    assert mean_weight(torch.tensor([0.0, 0.0])).item() == 1.0
    assert mean_weight(torch.tensor([0.0, 7.0])).item() == 1.0


def test_a_normalizer_is_read_under_batch_normalize_alone() -> None:
    config = CorrectionConfig(level="token", upper=100.0)
    assert_rows(run(ROWS, config, normalizer=2.0).is_weights, ROWS)
    normalised = run(ROWS, CorrectionConfig(level="token", upper=100.0, batch_normalize=True), normalizer=2.0)
    assert_rows(normalised.is_weights, [[w / 2 for w in row] for row in ROWS])


def test_batch_normalize_survives_a_batch_with_every_weight_masked() -> None:
    correction = run(ROWS, CorrectionConfig(level="token", control="mask", lower=9.0, upper=10.0, batch_normalize=True))
    assert correction.normalizer.item() == 1.0
    assert (correction.is_weights == 0).all()


def test_log_only_measures_and_changes_nothing() -> None:
    settings = {"level": "token", "upper": 1.5, "rejection": (RejectionRule(level="max", upper=3.0),), "veto_low": 0.3}
    real = run(ROWS, CorrectionConfig(**settings))
    logged = run(ROWS, CorrectionConfig(**settings, log_only=True))
    assert not real.mask.any()
    assert torch.equal(logged.is_weights, valid(ROWS).double())
    assert torch.equal(logged.mask, valid(ROWS))


def test_log_only_divides_by_nothing() -> None:
    assert run(ROWS, CorrectionConfig(level="token", upper=2.5, batch_normalize=True, log_only=True)).normalizer == 1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_tiles_do_not_change_the_result(level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal lengths, with a hole and an empty row, one by one and together."""
    rows = [[2.0, 0.0, 4.0, 0.0], [0.25, 0.0, 0.0, 0.0], [0.0] * 4, [1.5, 3.0, 0.5, 9.0]]
    rules = (RejectionRule(level="geometric", lower=0.5),)
    config = CorrectionConfig(level=level, upper=3.0, batch_normalize=True, rejection=rules, veto_high=8.0)
    together = run(rows, config)
    monkeypatch.setattr(tiling, "TILE_TOKENS", 1)
    apart = run(rows, config)
    torch.testing.assert_close(apart.is_weights, together.is_weights, rtol=1e-15, atol=0)
    assert torch.equal(apart.mask, together.mask)
    assert apart.mask.int().tolist() == [[1, 0, 1, 0], [0] * 4, [0] * 4, [0] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_in_is_dtype_out_and_nothing_carries_a_gradient(dtype) -> None:
    old = torch.full((1, 2), -1.0, dtype=dtype, requires_grad=True)
    correction = correct(old, old.detach() - 0.1, torch.ones(1, 2, dtype=torch.bool), preset("verl/seq_is_rs"))
    floats = [correction.is_weights, correction.normalizer]
    assert [tensor.dtype for tensor in floats] == [dtype] * 2
    assert not any(tensor.requires_grad for tensor in floats)


def test_bad_input_is_named() -> None:
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"old_logprobs \(2, 3\), rollout_logprobs \(2, 2\)"):
        correct(zeros, zeros[:, :2], mask, CorrectionConfig())
    with pytest.raises(ValueError, match=r"mask must be bool, got torch\.int64"):
        correct(zeros, zeros, mask.long(), CorrectionConfig())
    with pytest.raises(ValueError, match=r"rollout_logprobs must be float32 or float64, got torch\.bfloat16"):
        correct(zeros, zeros.bfloat16(), mask, CorrectionConfig())


class TestUnbiased:
    """All rows of two tokens over three symbols, each as likely as the rollout policy makes it."""

    rows = torch.tensor(list(itertools.product(range(3), repeat=2)))
    rollout = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    train = torch.tensor([0.2, 0.35, 0.45], dtype=torch.float64).log()
    value = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)

    def weights(self, level: str) -> Tensor:
        mask = torch.ones_like(self.rows, dtype=torch.bool)
        config = CorrectionConfig(level=level, upper=1e6)
        return correct(self.train[self.rows], self.rollout[self.rows], mask, config).is_weights

    def test_sequence_weights_for_any_function_of_the_row(self) -> None:
        row_value = self.value[self.rows].prod(dim=1)
        sampled = self.rollout[self.rows].sum(dim=1).exp()
        expected = (self.train[self.rows].sum(dim=1).exp() * row_value).sum()
        for level, unbiased in (("sequence", True), ("geometric", False)):
            estimate = (sampled * self.weights(level)[:, 0] * row_value).sum()
            assert torch.isclose(estimate, expected, rtol=1e-12).item() is unbiased

    def test_token_weights_for_a_function_of_the_token(self) -> None:
        sampled = self.rollout[self.rows].sum(dim=1, keepdim=True).exp()
        estimate = (sampled * self.weights("token") * self.value[self.rows]).sum(dim=0)
        expected = (self.train.exp() * self.value).sum().expand(2)
        torch.testing.assert_close(estimate, expected, rtol=1e-12, atol=0)
