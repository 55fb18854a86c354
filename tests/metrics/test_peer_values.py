"""Values computed by ms-swift's and verl's own code on the same inputs.

Two of their habits are undone here, not copied. Both take row means over all rows, a row without a valid token
counting as a perfect one (ratio 1, perplexity 1); ours leave such rows out. And both add 1e-8 to some denominators.
Values that went through float32 there (shares of rows) are compared to 1e-6.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.maths.correction import CorrectionConfig, RejectionRule
from app.metrics import diagnose
from tests.metrics.reference import KEY, clamp, mean

CASES: list[dict[str, Any]] = [
    case
    for path in sorted((Path(__file__).parents[1] / "peer_values").glob("rollout_correction*.json"))
    for case in json.loads(path.read_text())
]
PERFECT_ROW = {
    **{"training_ppl": 1.0, "rollout_ppl": 1.0, "training_log_ppl": 0.0, "rollout_log_ppl": 0.0},
    **{"log_ppl_diff": 0.0, "log_ppl_abs_diff": 0.0, "ppl_ratio": 1.0, "chi2_seq": 0.0},
}
SWIFT = {
    "token_truncate": lambda tau: CorrectionConfig(level="token", upper=tau),
    "token_mask": lambda tau: CorrectionConfig(level="token", control="mask", upper=tau),
    "sequence_truncate": lambda tau: CorrectionConfig(level="geometric", upper=tau),
    "sequence_mask": lambda tau: CorrectionConfig(level="token", bound_level="geometric", control="mask", upper=tau),
}
VERL_WEIGHTS = {
    "is=token@2.0,batch_normalize=False": CorrectionConfig(level="token", upper=2.0),
    "is=token@2.0,batch_normalize=True": CorrectionConfig(level="token", upper=2.0, batch_normalize=True),
    "is=token@0.5_5.0,batch_normalize=False": CorrectionConfig(level="token", control="mask", lower=0.5, upper=5.0),
    "is=sequence@2.0,batch_normalize=False": CorrectionConfig(level="sequence", upper=2.0),
    "is=sequence@5.0,batch_normalize=False": CorrectionConfig(level="sequence", upper=5.0),
}
RULES = {
    "token_k1@0.5_2.0": (RejectionRule(level="token", lower=0.5, upper=2.0),),
    "seq_sum_k1@0.5_2.0": (RejectionRule(level="sequence", lower=0.5, upper=2.0),),
    "seq_mean_k1@0.99_1.01": (RejectionRule(level="geometric", lower=1 / 1.01, upper=1 / 0.99),),
    "seq_mean_k3@0.01": (RejectionRule(level="geometric", statistic="k3", upper=0.01),),
    "seq_mean_k3@0.06": (RejectionRule(level="geometric", statistic="k3", upper=0.06),),
    "seq_max_k2@0.5": (RejectionRule(level="max", statistic="k2", upper=0.5),),
    "token_k2@0.1": (RejectionRule(level="token", statistic="k2", upper=0.1),),
    "seq_sum_k3@0.2": (RejectionRule(level="sequence", statistic="k3", upper=0.2),),
}
each_case = pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])


def tensors(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    old, rollout = (torch.tensor(case[name], dtype=torch.float64) for name in ("old_logprobs", "rollout_logprobs"))
    return old, rollout, torch.tensor(case["mask"]).bool()


def filled_share(case: dict[str, Any]) -> float:
    """Share of the rows that have a valid token."""
    return mean([float(any(row)) for row in case["mask"]])


def over_all_rows(case: dict[str, Any], value: float, empty: float) -> float:
    """Our mean over the non-empty rows as a mean over all rows, each empty one counting as `empty`."""
    share = filled_share(case)
    return share * value + (1 - share) * empty


def valid(case: dict[str, Any], values: list[list[float]]) -> list[float]:
    pairs = zip(values, case["mask"], strict=True)
    return [x for row, kept in pairs for x, keep in zip(row, kept, strict=True) if keep]


@each_case
def test_swift_diagnostics(case: dict[str, Any]) -> None:
    found = diagnose(*tensors(case))
    for key, peer in case["swift"]["diagnostics"].items():
        ours = found[KEY + key]
        if key in PERFECT_ROW:
            ours = over_all_rows(case, ours, PERFECT_ROW[key])
        if key.endswith(("_max", "_min")) and filled_share(case) < 1:
            ours = max(ours, 0.0) if key.endswith("_max") else min(ours, 0.0)
        assert ours == pytest.approx(peer, rel=1e-9), key


@each_case
@pytest.mark.parametrize("tau", [2.0, 1.05])
@pytest.mark.parametrize("mode", SWIFT)
def test_swift_modes(case: dict[str, Any], mode: str, tau: float) -> None:
    found = diagnose(*tensors(case), SWIFT[mode](tau))
    peer = case["swift"][f"{mode}@{tau}"]
    bounded_mean = mean([clamp(w, 1 / tau, tau) for w in valid(case, peer["weights"])])
    assert found[KEY + "is_weight_mean"] == pytest.approx(peer["metrics"]["is_weight_mean"], rel=1e-9)
    assert found[KEY + "ess"] * (1 + 1e-8 / bounded_mean) ** 2 == pytest.approx(peer["metrics"]["ess"], rel=1e-9)
    by_row = mode.startswith("sequence")
    clipped = found[KEY + "clipped_frac"] * (filled_share(case) if by_row else 1)
    assert clipped == pytest.approx(peer["metrics"]["clipped_frac"], rel=1e-6 if by_row else 1e-9)


@each_case
def test_verl_offpolicy(case: dict[str, Any]) -> None:
    """verl's k3 is uncapped (compared where no token reaches the cap), its chi2_seq is of the product."""
    found = diagnose(*tensors(case))
    for key, peer in case["verl"]["offpolicy"].items():
        if key in ("log_ppl_diff_max", "log_ppl_diff_min") or (key == "k3_kl" and peer > 10):
            continue
        ours = found[KEY + ("chi2_seq_product" if key == "chi2_seq" else key)]
        if key in PERFECT_ROW:
            ours = over_all_rows(case, ours, PERFECT_ROW[key])
        # 1e-8 beside a row's length of 1 shifts a mean log-probability of -24.8 by 2.5e-7, and its exponential too
        assert ours == pytest.approx(peer, rel=3e-7), key


@each_case
@pytest.mark.parametrize("name", VERL_WEIGHTS)
def test_verl_weights(case: dict[str, Any], name: str) -> None:
    config = VERL_WEIGHTS[name]
    found = {key.removeprefix(KEY): value for key, value in diagnose(*tensors(case), config).items()}
    peer = case["verl"][name]["metrics"]
    epsilon = 1 + 1e-8 / sum(map(sum, case["mask"]))
    average = found["is_weight_mean"]
    assert average / epsilon == pytest.approx(peer["rollout_is_mean"], rel=1e-9)
    ess = found["ess_exact"] * epsilon * (1 / epsilon + 1e-8 / average) ** 2
    assert ess == pytest.approx(peer["rollout_is_eff_sample_size"], rel=1e-9)
    # verl: sqrt(mean w² - (mean w)²), both means with the 1e-8
    spread = (found["is_weight_std"] ** 2 + average**2) / epsilon - (average / epsilon) ** 2
    assert math.sqrt(spread) == pytest.approx(peer["rollout_is_std"], rel=1e-9)
    share = filled_share(case) if config.level == "sequence" else 1.0
    assert found["clipped_frac_high"] * share == pytest.approx(peer["rollout_is_ratio_fraction_high"], rel=1e-6)
    if config.level == "token":  # at row level verl reports the extremes of the ratio before control
        assert found["is_weight_max"] == pytest.approx(peer["rollout_is_max"], rel=1e-9)
        assert found["is_weight_min"] == pytest.approx(peer["rollout_is_min"], rel=1e-9)
    if config.control == "mask":
        assert found["clipped_frac_low"] / epsilon == pytest.approx(peer["rollout_is_ratio_fraction_low"], rel=1e-9)
        assert found["clipped_frac"] / epsilon == pytest.approx(peer["rollout_is_oob_ratio"], rel=1e-9)


@each_case
@pytest.mark.parametrize("name", RULES)
def test_verl_rejection(case: dict[str, Any], name: str) -> None:
    found = diagnose(*tensors(case), CorrectionConfig(rejection=RULES[name]))
    peer = case["verl"][f"rs={name}"]
    tokens = sum(map(sum, case["mask"]))
    assert found[KEY + "rejected_token_fraction"] / (1 + 1e-8 / tokens) == pytest.approx(
        peer["metrics"]["rollout_rs_masked_fraction"], rel=1e-9
    )
    # verl's fraction of rows counts any row that lost a token; ours the rows that lost all of them
    lost = sum(any(before) and not any(after) for before, after in zip(case["mask"], peer["mask"], strict=True))
    assert found[KEY + "rejected_sequence_fraction"] == lost / sum(map(any, case["mask"]))
    if not name.startswith("token"):
        assert found[KEY + "rejected_sequence_fraction"] * filled_share(case) == pytest.approx(
            peer["metrics"]["rollout_rs_seq_masked_fraction"], rel=1e-6
        )
