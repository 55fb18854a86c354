from __future__ import annotations

import dataclasses

import pytest

from app.maths.correction import PRESETS, CorrectionConfig, RejectionRule, preset


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "tokens"}, r"correction\.level='tokens' is unknown; choose one of none, token, sequence, geometric"),
        ({"level": "token", "control": "clip", "upper": 2.0}, "choose one of truncate, mask"),
        ({"level": "token", "control": "mask", "bound_level": "max", "upper": 2.0}, "bound_level='max' is unknown"),
        ({"level": "token"}, r"control='truncate' needs correction\.upper"),
        ({"level": "token", "lower": 0.5}, r"control='truncate' needs correction\.upper"),
        ({"level": "token", "control": "mask"}, r"control='mask' needs correction\.lower or correction\.upper"),
        ({"level": "token", "upper": 0.0}, r"upper=0\.0: a bound is a finite number above 0"),
        ({"level": "token", "upper": float("nan")}, "upper=nan: a bound is a finite number"),
        ({"level": "token", "upper": 2.0, "lower": -1.0}, r"lower=-1\.0: a bound"),
        ({"level": "token", "upper": 1.0, "lower": 2.0}, r"lower=2\.0 is above correction\.upper=1\.0"),
        ({"level": "token", "upper": 2.0, "bound_level": "geometric"}, "bound_level='geometric' with control"),
        ({"upper": 2.0}, r"correction\.upper=2\.0 does nothing at level 'none'"),
        ({"bound_level": "token"}, "bound_level=token does nothing"),
        ({"control": "mask"}, "control='mask' does nothing"),
        ({"batch_normalize": True}, "batch_normalize=true does nothing"),
        ({"veto_low": 0.0}, r"veto_low=0\.0: a bound"),
        ({"veto_low": 2.0, "veto_high": 1.0}, r"veto_low=2\.0 is above"),
        ({"rejection": [{"level": "token"}]}, "without lower and upper keeps everything"),
    ],
)
def test_contradictions_are_refused_in_one_line(settings, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        CorrectionConfig(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "row", "upper": 1.0}, "choose one of token, sequence, geometric, max"),
        ({"level": "token", "statistic": "k1", "upper": 1.0}, "choose one of ratio, k2, k3"),
        ({"level": "token", "statistic": "k3", "lower": 0.1, "upper": 1.0}, "k3 is 0 at a perfect match; use upper"),
        ({"level": "token", "lower": 2.0, "upper": 1.0}, r"rejection\.lower=2\.0 is above rejection\.upper=1\.0"),
        ({"level": "token", "upper": 0.0}, r"rejection\.upper=0\.0"),
    ],
)
def test_contradictory_rules_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        RejectionRule(**settings)


def test_preset_overrides_and_unknown_names() -> None:
    assert preset("swift/token_truncate") == CorrectionConfig(level="token", control="truncate", upper=2.0)
    assert preset("swift/token_truncate", upper=1.05).upper == 1.05
    with pytest.raises(ValueError, match=r"preset='swift/token' is unknown; choose one of swift/token_truncate, "):
        preset("swift/token")
    with pytest.raises(ValueError, match=r"correction\.uper is unknown; choose from level, bound_level"):
        preset("swift/token_truncate", uper=1.05)
    with pytest.raises(ValueError, match="does nothing at level 'none'"):
        preset("swift/token_truncate", level="none")


def test_rules_may_come_as_mappings_and_the_config_stays_hashable() -> None:
    rule = {"level": "geometric", "statistic": "k3", "upper": 0.01}
    config = CorrectionConfig(rejection=[rule])
    assert config == preset("verl/k3_rs")
    assert hash(config) == hash(preset("verl/k3_rs"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.level = "token"


def test_the_presets_are_those_of_the_design() -> None:
    trainers = {name.split("/")[0] for name in PRESETS}
    assert trainers == {"swift", "verl", "trl", "nemo"}
    assert len(PRESETS) == 20
    nemo = PRESETS["nemo/seq_mask_tis"]
    assert (nemo.level, nemo.bound_level, nemo.control) == ("token", "geometric", "mask")
    assert (nemo.lower, nemo.upper) == (0.999, 1.002)
    trl = PRESETS["trl/sequence_mask"]
    assert (trl.level, trl.control, trl.lower, trl.upper) == ("sequence", "mask", None, 3.0)
    assert PRESETS["verl/bypass"].bypass


def test_verl_bypass_presets_have_verls_settings() -> None:
    """Of its RolloutCorrectionConfig: weights truncated at 2, k3 at most 0.01, rollout / train in [0.999, 1.001]."""
    rules = {}
    for name in (
        "bypass_ppo_clip_geo_rs",
        "bypass_pg_geo_rs",
        "bypass_pg_geo_rs_seq_tis",
        "bypass_pg_geo_rs_token_tis",
    ):
        (rules[name],) = PRESETS[f"verl/{name}"].rejection
    for rule in rules.values():
        assert (rule.level, rule.statistic) == ("geometric", "ratio")
        assert (1 / rule.upper, 1 / rule.lower) == (pytest.approx(0.999, rel=1e-12), pytest.approx(1.001, rel=1e-12))
    (k3,) = PRESETS["verl/bypass_ppo_clip_k3_rs"].rejection
    assert (k3.level, k3.statistic, k3.upper) == ("geometric", "k3", 0.01)
    assert PRESETS["verl/bypass_pg_is"].rejection == ()
    bypasses = {name.removeprefix("verl/"): config for name, config in PRESETS.items() if "bypass" in name}
    assert all(config.bypass for config in bypasses.values())
    assert {name: (config.level, config.upper) for name, config in bypasses.items() if config.level != "none"} == {
        "bypass_pg_is": ("sequence", 2.0),
        "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0),
        "bypass_pg_geo_rs_token_tis": ("token", 2.0),
    }
