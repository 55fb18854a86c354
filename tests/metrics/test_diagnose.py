"""The diagnostics against plain loops, and under inputs meant to break them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from app.maths.correction import CorrectionConfig, RejectionRule
from app.metrics import diagnose
from tests.metrics.reference import KEY, assert_close, assert_same, correlation, expected, make_rows, mean

CONFIGS = {
    "no correction": None,
    "level none": CorrectionConfig(),
    "token truncate": CorrectionConfig(level="token", upper=1.2),
    "token truncate with floor": CorrectionConfig(level="token", lower=0.9, upper=1.2),
    "token mask": CorrectionConfig(level="token", control="mask", lower=0.8, upper=1.3),
    "token mask, lower only": CorrectionConfig(level="token", control="mask", lower=0.8),
    "geometric truncate": CorrectionConfig(level="geometric", upper=1.02),
    "sequence mask": CorrectionConfig(level="sequence", control="mask", lower=0.5, upper=1.5),
    "token weights, geometric bound": CorrectionConfig(
        level="token", bound_level="geometric", control="mask", lower=0.97, upper=1.02
    ),
    "sequence weights, token bound": CorrectionConfig(level="sequence", bound_level="token", control="mask", upper=1.4),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("noise", [1e-4, 0.3])
def test_equals_the_loop(name: str, noise: float) -> None:
    rows = make_rows(seed=3, noise=noise)
    assert_close(diagnose(*rows, CONFIGS[name]), expected(*rows, CONFIGS[name]))


def test_huge_ratios_equal_the_loop() -> None:
    old, rollout, mask = make_rows(seed=5)
    old[0, 0], rollout[1, 0] = -45.0, -700.0
    rows = (old, rollout, mask)
    assert_close(diagnose(*rows), expected(*rows, None))


def test_float32_input_is_summed_in_float64() -> None:
    old, rollout, mask = make_rows(seed=1)
    single = (old.float(), rollout.float(), mask)
    assert_close(diagnose(*single), expected(single[0].double(), single[1].double(), mask, None))


def test_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        old, rollout, mask = make_rows(seed=1)
        diagnose(old, rollout, mask)
        assert torch.get_num_threads() == 2
        with pytest.raises(AttributeError):
            diagnose(old, rollout, mask, "not a config")  # type: ignore[arg-type]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_equal_policies_are_perfect() -> None:
    old, _, mask = make_rows(seed=2)
    found = diagnose(old, old, mask, CorrectionConfig(level="token", upper=2.0))
    zero = ["kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "clipped_frac", "logprob_abs_diff_p99"]
    one = ["ess", "ess_exact", "ess_sequence", "is_weight_mean", "ppl_ratio", "ratio_p99", "prob_pearson"]
    assert [found[KEY + key] for key in zero] == [0.0] * len(zero)
    assert [found[KEY + key] for key in one] == pytest.approx([1.0] * len(one), abs=1e-15)


def test_kl_sign() -> None:
    """Tokens the engine likes more than the trainer: rollout - old > 0, so kl > 0 and training_ppl > rollout_ppl."""
    mask = torch.ones(1, 4, dtype=torch.bool)
    found = diagnose(torch.full((1, 4), -2.0), torch.full((1, 4), -1.5), mask)
    assert found[KEY + "kl"] == 0.5
    assert found[KEY + "log_ppl_diff"] == 0.5
    assert found[KEY + "training_ppl"] == pytest.approx(math.exp(2.0), rel=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e10])
def test_masked_positions_are_never_read(bad: float) -> None:
    old, rollout, mask = make_rows(seed=4)
    config = CorrectionConfig(
        level="token", upper=1.2, veto_high=3.0, rejection=(RejectionRule(level="geometric", upper=1.05),)
    )
    assert_same(
        diagnose(old.masked_fill(~mask, bad), rollout.masked_fill(~mask, bad), mask, config),
        diagnose(old.masked_fill(~mask, 0.0), rollout.masked_fill(~mask, 0.0), mask, config),
    )


def test_missing_and_nonfinite_tokens_are_left_out_and_counted() -> None:
    old, rollout, mask = make_rows(seed=6)
    mask[0, :4] = True
    valid = int(mask.sum())
    without = mask.clone()
    without[0, :4] = False
    wanted = diagnose(old, rollout, without)
    rollout[0, 0], rollout[0, 1] = math.nan, -math.inf
    old[0, 2], old[0, 3] = math.nan, math.inf
    found = diagnose(old, rollout, mask)
    wanted |= {KEY + "missing_logprob_fraction": 1 / valid, KEY + "nonfinite_logprob_fraction": 3 / valid}
    assert_same(found, wanted)


def test_no_rollout_logprobs_at_all() -> None:
    old, _, mask = make_rows(seed=6)
    found = diagnose(old, None, mask, policy_lag=1)
    assert found == {
        KEY + "missing_logprob_fraction": 1.0,
        KEY + "nonfinite_logprob_fraction": 0.0,
        KEY + "policy_lag": 1.0,
    }


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (3, 0)])
@pytest.mark.parametrize("name", ["no correction", "token truncate", "sequence mask"])
def test_nothing_valid_gives_no_keys(shape: tuple[int, int], name: str) -> None:
    rows = shape[0]
    found = diagnose(
        torch.full(shape, math.nan),
        torch.full(shape, -math.inf),
        torch.zeros(shape, dtype=torch.bool),
        CONFIGS[name],
        rewards=torch.ones(rows),
        advantages=torch.ones(rows),
        off_policy_keep=torch.zeros(rows, dtype=torch.bool),
        policy_lag=2.0,
    )
    assert found == {}


def test_every_weight_masked_to_zero() -> None:
    old, rollout, mask = make_rows(seed=7)
    found = diagnose(old, rollout, mask, CorrectionConfig(level="token", control="mask", lower=1e5, upper=1e6))
    assert found[KEY + "clipped_frac"] == 1.0
    assert found[KEY + "ess_exact"] == found[KEY + "ess_sequence"] == found[KEY + "is_weight_mean"] == 0.0
    assert found[KEY + "ess"] == pytest.approx(1.0)  # ms-swift's: all zeros are lifted to 1/upper
    assert not any(math.isnan(value) for value in found.values())


def test_rejection_and_veto_fractions() -> None:
    """Rows of 4, 2, 2 and 0 valid tokens, ratios in powers of two, counted by hand."""
    ratios = torch.tensor([[1.0, 4.0, 1.0, 1.0], [1.0, 16.0, 9.0, 9.0], [0.25, 0.25, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    rollout = torch.full((4, 4), -3.0)
    config = CorrectionConfig(
        veto_high=10.0, rejection=(RejectionRule(level="token", statistic="ratio", lower=0.5, upper=2.0),)
    )
    found = diagnose(rollout + ratios.log(), rollout, mask, config)
    assert found[KEY + "rejected_token_fraction"] == 5 / 8  # 1 of row 0, row 1 by the veto, both of row 2
    assert found[KEY + "rejected_sequence_fraction"] == 2 / 3
    assert found[KEY + "veto_fraction"] == 1 / 3


def test_log_only_reports_what_would_have_been() -> None:
    rows = make_rows(seed=8)
    rule = (RejectionRule(level="token", upper=1.1),)
    applied = CorrectionConfig(level="token", upper=1.2, rejection=rule)
    assert_same(
        diagnose(*rows, CorrectionConfig(level="token", upper=1.2, rejection=rule, log_only=True)),
        diagnose(*rows, applied),
    )


def test_batch_normalisation_does_not_change_the_diagnostics() -> None:
    rows = make_rows(seed=8)
    normalised = CorrectionConfig(level="token", upper=1.2, batch_normalize=True)
    assert_same(diagnose(*rows, normalised), diagnose(*rows, CorrectionConfig(level="token", upper=1.2)))


def test_optional_inputs() -> None:
    old, rollout, mask = make_rows(seed=9)  # row 3 of 7 is empty
    rewards = torch.tensor([1.0, 0.0, 0.5, 9.0, 0.25, math.nan, 1.0])
    advantages = torch.tensor([-1.0, 1.0, -0.5, -9.0, -0.1, 0.0, 1.0])
    keep = torch.tensor([False, False, True, False, True, True, True])
    lag = torch.tensor([0, 1, 1, 50, 1, 0, 2])
    found = diagnose(old, rollout, mask, rewards=rewards, advantages=advantages, off_policy_keep=keep, policy_lag=lag)
    rows = [i for i in range(7) if i not in (3, 5)]
    row_logs = [mean([(old - rollout)[i, t].item() for t in range(23) if mask[i, t]]) for i in rows]
    assert found[KEY + "ratio_reward_corr"] == pytest.approx(
        correlation(row_logs, [rewards[i].item() for i in rows]), rel=1e-12
    )
    assert found[KEY + "off_policy_sequence_fraction"] == 2 / 6
    assert found[KEY + "off_policy_sequence_fraction_negative"] == 1 / 3
    assert found[KEY + "policy_lag"] == 5 / 6
    plain = diagnose(old, rollout, mask)
    assert found.keys() - plain.keys() == {
        KEY + key
        for key in (
            "ratio_reward_corr",
            "off_policy_sequence_fraction",
            "off_policy_sequence_fraction_negative",
            "policy_lag",
        )
    }


def test_correlations_without_spread_are_absent() -> None:
    old = torch.full((3, 4), -0.7, dtype=torch.float64)
    found = diagnose(old, old - 0.1, torch.ones(3, 4, dtype=torch.bool), rewards=torch.full((3,), 0.1))
    assert KEY + "prob_pearson" not in found
    assert KEY + "ratio_reward_corr" not in found
    assert found[KEY + "prob_diff_std"] == 0.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask": torch.ones(2, 3)}, "mask must be bool"),
        ({"rollout_logprobs": torch.zeros(2, 4)}, r"rollout_logprobs has shape \(2, 4\), expected \(2, 3\)"),
        ({"old_logprobs": torch.zeros(2, 3).bfloat16()}, "old_logprobs must be float32 or float64, got torch.bfloat16"),
        ({"off_policy_keep": torch.ones(2)}, "off_policy_keep must be bool"),
        ({"rewards": torch.zeros(3)}, r"rewards has shape \(3,\), expected \(2,\)"),
    ],
)
def test_shapes_and_dtypes_are_checked(changed: dict[str, Tensor], message: str) -> None:
    inputs = {
        "old_logprobs": torch.zeros(2, 3),
        "rollout_logprobs": torch.zeros(2, 3),
        "mask": torch.ones(2, 3).bool(),
    }
    with pytest.raises(ValueError, match=message):
        diagnose(**(inputs | changed))
