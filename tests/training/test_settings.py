from app.maths.correction import RejectionRule, preset
from app.training.settings import CorrectionSettings


def test_what_is_not_said_is_as_the_preset_has_it():
    assert CorrectionSettings(preset="verl/seq_is_rs").resolve() == preset("verl/seq_is_rs")


def test_null_takes_a_part_of_the_preset_away():
    assert CorrectionSettings(preset="verl/token_icepop", lower=None).resolve().lower is None
    assert CorrectionSettings(preset="verl/seq_is_rs", rejection=None).resolve().rejection == ()
    assert CorrectionSettings(preset="verl/seq_is_rs", upper=3.0).resolve().upper == 3.0


def test_without_a_preset_nothing_is_corrected_but_what_is_said():
    settings = CorrectionSettings(preset=None, rejection=[{"level": "max", "upper": 4.0}])
    assert settings.resolve().level == "none"
    assert settings.resolve().rejection == (RejectionRule(level="max", upper=4.0),)
