"""Which factors are tried for which pipeline and in what order; their remedies can be laid over a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from app.audit.attribution.factors import Pipeline, Toggle, toggles
from app.audit.sides.condition import Condition, EngineCondition, SamplingSupport, TrainerCondition
from app.types import SamplingConfig

HEALTHY = Pipeline(
    engine_class="app.engine.vllm.engine.VLLMEngine",
    engine_arguments={"dtype": "float32", "kv_cache_dtype": "auto", "quantization": None, "enforce_eager": None},
    engine_dtype="float32",
    quantized=False,
    trainer_dtype="float32",
    attention="sdpa",
    sampling=SamplingConfig(),
    lora=False,
    experts=False,
    prompts_changed=False,
    weights_proven=True,
    engine_temperature=1.0,
    trainer_temperature=1.0,
    supports=(),
)


def tried(**changed: Any) -> list[Toggle]:
    return toggles(dataclasses.replace(HEALTHY, **changed))


def test_a_healthy_pipeline_has_few_suspects() -> None:
    assert [toggle.key for toggle in tried()] == ["prefix_cache", "batch_shape", "padding", "attention"]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"prompts_changed": True}, "prompt_ids"),
        ({"lora": True}, "lora_merge"),
        ({"weights_proven": False}, "weights"),
        ({"sampling": SamplingConfig(top_p=0.8)}, "sampling_processors"),
        ({"supports": (SamplingSupport(top_k=5),)}, "sampling_processors"),
        ({"engine_temperature": 0.7}, "temperature"),
        ({"trainer_temperature": 0.7}, "temperature"),
        ({"experts": True}, "moe_routing"),
        ({"engine_arguments": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype"),
        ({"engine_arguments": {"quantization": "fp8"}}, "quantization"),
        ({"engine_arguments": {"engine_args": {"hf_overrides": {"rope_theta": 1.0}}}}, "engine_args.hf_overrides"),
        ({"engine_arguments": {"enforce_eager": False}}, "enforce_eager"),
        ({"engine_dtype": "bfloat16"}, "engine_dtype"),
        ({"trainer_dtype": "bfloat16"}, "trainer_dtype"),
        ({"trainer_dtype": "bfloat16", "engine_dtype": "float16"}, "precision"),
    ],
)
def test_what_differs_is_a_suspect_with_a_remedy_in_yaml(changed: dict[str, Any], key: str) -> None:
    before = {toggle.key for toggle in tried()}
    found = [toggle for toggle in tried(**changed) if toggle.key == key]
    assert key not in before
    assert found
    for toggle in found:
        fragment = yaml.safe_load(toggle.remedy)  # comments alone where there is no such setting
        assert fragment is None or fragment.keys() <= {"data", "model", "trainer"}
        assert toggle.apply(Condition()) != Condition()


def test_smaller_interventions_come_first() -> None:
    keys = [
        toggle.key
        for toggle in tried(
            prompts_changed=True,
            weights_proven=False,
            engine_temperature=0.7,
            engine_arguments={"kv_cache_dtype": "fp8"},
            engine_dtype="bfloat16",
            trainer_dtype="bfloat16",
        )
    ]
    order = ["prompt_ids", "prefix_cache", "batch_shape", "weights", "temperature", "padding", "attention"]
    order += ["kv_cache_dtype", "engine_dtype", "trainer_dtype", "precision"]
    assert list(dict.fromkeys(keys)) == order


def test_changes_add_up() -> None:
    both = {toggle.key: toggle for toggle in tried(engine_arguments={"kv_cache_dtype": "fp8"}, engine_dtype="bfloat16")}
    first = both["kv_cache_dtype"].apply(Condition(trainer=TrainerCondition(attention="eager")))
    second = both["engine_dtype"].apply(first)
    assert second.engine == EngineCondition(args=(("dtype", "float32"), ("kv_cache_dtype", "auto")))
    assert second.trainer == TrainerCondition(attention="eager")
    assert both["prefix_cache"].apply(second).engine == dataclasses.replace(second.engine, read_prefix_cache=False)


def test_what_becomes_of_the_engine_that_sampled() -> None:
    by_change = {
        toggle.change: toggle for toggle in tried(weights_proven=False, engine_arguments={"kv_cache_dtype": "fp8"})
    }
    disruptions = {change: toggle.disruption(Condition()) for change, toggle in by_change.items()}
    assert disruptions["no cached block is read"] == 0
    assert disruptions["sdpa -> eager"] == 0
    assert disruptions["the trainer's weights sent once more"] == 1
    assert disruptions["engine started from the trainer's weights"] == 2
    assert disruptions["fp8 -> auto"] == 2
