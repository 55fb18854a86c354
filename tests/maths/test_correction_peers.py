"""Weights and masks equal the values that ms-swift's and verl's own functions gave for the same numbers.

The values lie in tests/peer_values/*.json; a file dropped in there is compared too. Two habits of verl are undone
here, not copied: its means add 1e-8 to the count, and its k1 bounds are on rollout / train.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.maths.correction import Correction, CorrectionConfig, RejectionRule, correct, preset
from app.maths.offpolicy import sequence_keep

CASES = [
    case
    for path in sorted(Path(__file__).parents[1].glob("peer_values/*.json"))
    for case in json.loads(path.read_text())
]

VERL_RULES = {
    "token_k1": ("token", "ratio"),
    "seq_sum_k1": ("sequence", "ratio"),
    "seq_mean_k1": ("geometric", "ratio"),
    "token_k2": ("token", "k2"),
    "seq_sum_k2": ("sequence", "k2"),
    "seq_mean_k2": ("geometric", "k2"),
    "seq_max_k2": ("max", "k2"),
    "token_k3": ("token", "k3"),
    "seq_sum_k3": ("sequence", "k3"),
    "seq_mean_k3": ("geometric", "k3"),
    "seq_max_k3": ("max", "k3"),
}


def entries(peer: str, prefix: str) -> list[Any]:
    """(case, key, value) of every entry of `peer` whose key starts with `prefix`, as pytest parameters."""
    found = [(case, key, case[peer][key]) for case in CASES for key in case[peer] if key.startswith(prefix)]
    return [pytest.param(*entry, id=f"{entry[0]['id']}-{entry[1]}") for entry in found]


def floats(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(case: dict[str, Any], config: CorrectionConfig) -> Correction:
    mask = torch.tensor(case["mask"]).bool()
    return correct(floats(case["old_logprobs"]), floats(case["rollout_logprobs"]), mask, config)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("case", "key", "peer"), entries("swift", "token_") + entries("swift", "sequence_"))
def test_swift_weights(case: dict[str, Any], key: str, peer: dict[str, Any]) -> None:
    mode, threshold = key.split("@")
    correction = run(case, preset(f"swift/{mode}", upper=float(threshold)))
    assert_equal(correction.is_weights, floats(peer["weights"]))
    assert torch.equal(correction.mask, torch.tensor(case["mask"]).bool())


@pytest.mark.parametrize(("case", "key", "peer"), entries("swift", "off_policy_sequence_keep"))
def test_swift_off_policy_mask(case: dict[str, Any], key: str, peer: list[int]) -> None:
    new, rollout = floats(case["new_logprobs"]), floats(case["rollout_logprobs"])
    mask = torch.tensor(case["mask"]).bool()
    keep = sequence_keep(new, rollout, mask, floats(case["advantages"]), delta=float(key.split("@")[1]))
    assert keep.tolist() == [bool(value) for value in peer]


@pytest.mark.parametrize(("case", "key", "peer"), entries("verl", "is="))
def test_verl_weights(case: dict[str, Any], key: str, peer: dict[str, Any]) -> None:
    match = re.fullmatch(r"is=(token|sequence)@([\d.]+)(?:_([\d.]+))?,batch_normalize=(True|False)", key)
    assert match, f"unknown key {key}"
    level, first, second, normalize = match.groups()
    if second is None:
        name = {"token": "verl/token_is", "sequence": "verl/seq_is"}[level]
        config = preset(name, upper=float(first), batch_normalize=normalize == "True")
    else:
        bounds = {"lower": float(first), "upper": float(second)}
        config = preset("verl/token_icepop", **bounds, batch_normalize=normalize == "True")
    correction = run(case, config)
    factor = peer["metrics"].get("rollout_is_batch_norm_factor", 1.0)
    assert correction.normalizer.item() == pytest.approx(factor, rel=2e-8)  # the 1e-8 that verl adds to counts
    assert_equal(correction.is_weights * correction.normalizer, floats(peer["weights"]) * factor)


@pytest.mark.parametrize(("case", "key", "peer"), entries("verl", "rs="))
def test_verl_rejection(case: dict[str, Any], key: str, peer: dict[str, Any]) -> None:
    names, thresholds = key.removeprefix("rs=").split("@")
    rules = []
    for name, threshold in zip(names.split(","), thresholds.split(","), strict=True):
        level, statistic = VERL_RULES[name]
        if statistic == "ratio":
            low, high = (float(bound) for bound in threshold.split("_"))
            rules.append(RejectionRule(level=level, statistic="ratio", lower=1 / high, upper=1 / low))
        else:
            rules.append(RejectionRule(level=level, statistic=statistic, upper=float(threshold)))
    correction = run(case, preset("verl/geo_rs", rejection=rules))
    assert correction.mask.int().tolist() == peer["mask"]
    assert torch.equal(correction.is_weights, floats(case["mask"])), "rejection must not touch the weights"


def test_every_entry_is_compared() -> None:
    """A new kind of entry must fail here until a test above reads it."""
    assert CASES
    for case in CASES:
        known = [key for key in case["swift"] if re.match("token_|sequence_|off_policy_sequence_keep|diagnostics", key)]
        known += [key for key in case["verl"] if re.match("is=|rs=|offpolicy", key)]
        assert sorted(known) == sorted([*case["swift"], *case["verl"], *case["trl"]])
