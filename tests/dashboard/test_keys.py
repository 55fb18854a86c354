"""The table of keys, and the look-up of a tag in both tables."""

from __future__ import annotations

import pytest

from app.dashboard import keys
from app.metrics import table


def test_keys_are_unique_and_both_tables_are_in() -> None:
    names = [info.key for info in keys.ALL]
    assert len(set(names)) == len(names) == len(table.DOCUMENTED) + len(keys.KEYS)


@pytest.mark.parametrize(
    ("tag", "key"),
    [
        ("rollout_correction/k3_kl", "rollout_correction/k3_kl"),
        ("rollout_correction/abs_diff_at_position/000256", "rollout_correction/abs_diff_at_position/<first>"),
        ("policy/grad_norm", "policy/grad_norm"),
        ("rollout/reward_mean", "rollout/reward_mean"),
        ("rollout/reward/maths_answer_mean", "rollout/reward/<name>_mean"),
        ("rollout/reward/maths_answer_std", "rollout/reward/<name>_std"),
        ("val/truncated_fraction", "val/truncated_fraction"),
        ("val/maths_answer", "val/<name>"),
        ("time/tokens_per_second", "time/tokens_per_second"),
    ],
)
def test_find(tag: str, key: str) -> None:
    info = keys.find(tag)
    assert info is not None
    assert info.key == key


@pytest.mark.parametrize("tag", ["epoch", "k3_kl", "rollout_correction/k3_kl2", "xpolicy/loss", "val/a/b", "lr-AdamW"])
def test_unknown_tags(tag: str) -> None:
    assert keys.find(tag) is None


def test_description_says_all_that_the_table_knows() -> None:
    info = keys.find("rollout_correction/ess_exact")
    assert info is not None
    text = keys.describe(info)
    assert text.startswith("effective sample size of the weights")
    for fact in (
        *("**unit:** fraction", "**mean over:** tokens", "**better:** to 1", "**healthy:** ≥ 0.9"),
        *("**alarm:** < 0.3", "**measured:** every step", "l = old - rollout"),
    ):
        assert fact in text


def test_description_of_a_key_without_ranges() -> None:
    info = keys.find("policy/entropy")
    assert info is not None
    text = keys.describe(info)
    assert "**unit:** nats" in text
    for absent in ("better", "healthy", "alarm", "l = old"):
        assert absent not in text
