"""Strategies by name, and settings that contradict each other."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, StrategyRegistry

from app.distributed.strategies import (
    FORMS,
    CPUZeroStrategy,
    ZeroStrategy,
    check_deepspeed_config,
    check_name,
    check_strategy,
    register_strategies,
)
from app.errors import LockstepError


def test_every_name_of_deepspeed_means_our_form_of_it():
    register_strategies()
    names = [name for name in StrategyRegistry if name.startswith("deepspeed")]
    assert set(names) == {*FORMS, *(f"deepspeed_cpu_stage_{stage}" for stage in (1, 2, 3))}
    plain = ZeroStrategy if torch.cuda.is_available() else CPUZeroStrategy
    for name in names:
        strategy = StrategyRegistry.get(name)
        assert type(strategy) is (CPUZeroStrategy if "cpu" in name else plain)
        check_strategy(strategy, None)
    assert StrategyRegistry.get("deepspeed_stage_3").config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, FSDPStrategy])
def test_other_forms_are_refused(strategy):
    with pytest.raises(LockstepError, match=r"trainer\.strategy: .*(ZeroStrategy|deepspeed_stage)"):
        check_strategy(strategy(), None)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps", "trainer.accumulate_grad_batches"]),
        ({"train_batch_size": 64}, ["train_batch_size", "data.prompts_per_rollout"]),
        ({"optimizer": {"type": "Adam"}}, ["optimizer", "model.optim"]),
        ({"gradient_clipping": 0.5}, ["gradient_clipping=0.5", "trainer.gradient_clip_val=1.0"]),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, ["bf16.check_grad_overflow=False"]),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, ["zero_optimization.compute_grad_norm"]),
        ({"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}, ["grad_accum_dtype"]),
    ],
)
def test_a_configuration_that_contradicts_is_refused_by_both_keys(config, named):
    with pytest.raises(LockstepError) as error:
        check_deepspeed_config(config, gradient_clip_val=1.0)
    assert all(word in str(error.value) for word in named)


def test_an_agreeing_configuration_passes():
    check_deepspeed_config({"gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}, gradient_clip_val=1.0)
    check_deepspeed_config({"gradient_clipping": 0.0}, gradient_clip_val=None)


def test_a_misspelt_name_is_answered_by_the_right_one():
    register_strategies()
    with pytest.raises(LockstepError, match=r"trainer\.strategy=deepspeed_stage3: .*did you mean deepspeed_stage_3"):
        check_name("deepspeed_stage3")
    check_name("auto")
    check_name("ddp")
