"""The table of loss types, and the settings that are refused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from app.maths.correction import PRESETS, CorrectionConfig, RejectionRule
from app.maths.objective import LOSS_FORMS, LossConfig, check_combination

LOSS_FORMS_OF_THE_PAPERS = {
    "grpo": ("ppo_clip", "row_mean", 0.2, 0.2),
    "bnpo": ("ppo_clip", "micro_batch_token_mean", 0.2, 0.2),
    "dr_grpo": ("ppo_clip", "constant_length", 0.2, 0.2),
    "dapo": ("ppo_clip", "token_mean", 0.2, 0.28),
    "gspo": ("gspo", "row_mean", 3e-4, 4e-4),
    "gspo-token": ("gspo_token", "row_mean", 3e-4, 4e-4),
    "cispo": ("cispo", "token_mean", 1.0, 4.0),
    "sapo": ("sapo", "row_mean", None, None),
    "reinforce": ("reinforce", "token_mean", None, None),
}


@pytest.mark.parametrize("loss_type", LOSS_FORMS_OF_THE_PAPERS)
def test_each_loss_type_has_the_form_of_its_paper(loss_type) -> None:
    form = LossConfig(loss_type=loss_type, max_completion_length=8).form
    assert dataclasses.astuple(form) == LOSS_FORMS_OF_THE_PAPERS[loss_type]
    assert LOSS_FORMS.keys() == LOSS_FORMS_OF_THE_PAPERS.keys()


def test_settings_replace_parts_of_the_form() -> None:
    form = LossConfig(loss_type="grpo", aggregation="token_mean", epsilon_low=0.0, epsilon_high=0.3).form
    assert (form.surrogate, form.aggregation, form.epsilon_low, form.epsilon_high) == ("ppo_clip", "token_mean", 0, 0.3)
    assert LossConfig() == LossConfig(loss_type="dapo")
    assert LossConfig().form.aggregation == "token_mean"


def test_the_estimator_is_that_of_the_place_of_the_penalty() -> None:
    assert LossConfig(beta=0.1).kl_estimator_in_force == "k3"
    assert LossConfig(beta=0.1, kl_in_reward=True).kl_estimator_in_force == "k1"
    assert LossConfig(beta=0.1, kl_in_reward=True, kl_estimator="k2").kl_estimator_in_force == "k2"
    assert [LossConfig(beta=b, kl_in_reward=r).kl_in_loss for b, r in ((0.0, False), (0.1, False), (0.1, True))] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ppo"}, r"loss\.loss_type='ppo' is unknown; choose one of grpo, bnpo, dr_grpo, dapo, gspo, gsp"),
        ({"loss_type": None}, r"loss\.loss_type=None is unknown"),
        ({"aggregation": "mean"}, "choose one of token_mean, row_mean, constant_length, micro_batch_token_mean"),
        ({"denominator": "rows"}, "choose one of all, kept"),
        ({"kl_estimator": "k4"}, "choose one of k1, k2, k3"),
        ({"epsilon_low": 1.5}, r"loss\.epsilon_low=1\.5"),
        ({"epsilon_high": -0.1}, r"loss\.epsilon_high=-0\.1"),
        ({"epsilon_low": 0.2, "loss_type": "sapo"}, r"loss\.epsilon_low=0\.2 does nothing with loss_type 'sapo'"),
        ({"epsilon_high": 0.2, "loss_type": "reinforce"}, r"epsilon_high=0\.2 does nothing with loss_type 'reinforce'"),
        ({"delta": 3.0, "loss_type": "gspo"}, "does nothing with loss_type 'gspo'"),
        ({"delta": 3.0, "loss_type": "sapo"}, "does nothing with loss_type 'sapo'"),
        ({"delta": 1.28}, r"must be above 1 \+ epsilon_high = 1\.28"),
        ({"delta": 1.3, "epsilon_high": 0.4}, r"must be above 1 \+ epsilon_high = 1\.4"),
        ({"sapo_temperature_neg": 0.0}, "must be above 0"),
        ({"sapo_temperature_neg": 2.0}, "do nothing with loss_type 'dapo'"),
        ({"kl_estimator": "k1"}, r"loss\.kl_estimator='k1' does nothing with loss\.beta=0"),
        ({"beta": math.inf}, "must be a finite number"),
        ({"aggregation": "constant_length"}, r"needs loss\.max_completion_length"),
        ({"loss_type": "dr_grpo"}, r"needs loss\.max_completion_length"),
        ({"beta": -1.0}, r"loss\.beta=-1\.0"),
        ({"kl_in_reward": True}, r"loss\.kl_in_reward=true does nothing with loss\.beta=0"),
        ({"use_bias_correction_kl": True}, r"loss\.use_bias_correction_kl=true does nothing with loss\.beta=0"),
        ({"use_bias_correction_kl": True, "kl_in_reward": True, "beta": 0.1}, "the loss then has no KL term"),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(settings, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LossConfig(**settings)
    assert "\n" not in str(caught.value)


TOKEN = {"level": "token", "upper": 2.0}
REJECTION = {"rejection": [RejectionRule(level="token", upper=2.0)]}


@pytest.mark.parametrize(
    ("loss", "correction", "message"),
    [
        *(
            ({"loss_type": name, "max_completion_length": 8}, {"bypass": True, **TOKEN}, "count the mismatch twice")
            for name in LOSS_FORMS
            if name != "reinforce"
        ),
        ({}, {"bypass": True, "log_only": True}, "all the same"),
        ({"loss_type": "reinforce"}, {"bypass": True}, "nothing corrects"),
        (
            {"loss_type": "reinforce", "beta": 0.1, "use_bias_correction_kl": True},
            {"bypass": True, **TOKEN},
            "multiplied by new / rollout twice",
        ),
        ({"loss_type": "reinforce"}, {"bypass": True, **TOKEN, "log_only": True}, "all the same"),
    ],
)
def test_contradictions_of_loss_and_correction_are_refused_in_one_line(loss, correction, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_combination(LossConfig(**loss), CorrectionConfig(**correction))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        ({}, {"bypass": True}),
        ({}, {"bypass": True, **REJECTION}),
        ({}, {**TOKEN, **REJECTION, "log_only": True}),
        ({"loss_type": "reinforce"}, {"bypass": True, **TOKEN}),
        ({"loss_type": "reinforce"}, {"bypass": True, "veto_low": 1e-4}),
        ({"loss_type": "reinforce"}, {}),
        (
            {"loss_type": "reinforce", "beta": 0.1, "use_bias_correction_kl": True},
            {"bypass": True, "weight_kl": False, **TOKEN},
        ),
        ({"beta": 0.1, "use_bias_correction_kl": True}, TOKEN),
        ({"beta": 0.1}, {"weight_kl": False, **TOKEN}),
        ({}, {"weight_kl": False, **TOKEN}),  # a peer's settings stay right when beta is raised later
    ],
)
def test_what_fits_together_passes(loss, correction) -> None:
    check_combination(LossConfig(**loss), CorrectionConfig(**correction))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_loss(name) -> None:
    check_combination(LossConfig(loss_type="reinforce" if "bypass_pg" in name else "dapo"), PRESETS[name])
