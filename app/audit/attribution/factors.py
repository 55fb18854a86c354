"""The factors that can make engine and trainer differ, each with the change that removes it and the remedy.

The smallest intervention comes first. A later change may contain an earlier one (a new engine has fresh weights and an
empty cache), so among changes that explain the same share the first is the cause.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.audit.sides.condition import Condition, EngineCondition, SamplingSupport
from app.audit.types import Side
from app.policy.loading import Attention, Dtype
from app.types import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The properties of engine, trainer and samples that factors depend on."""

    engine_class: str
    """Import path of the engine's class, for `data.engine.class_path`."""
    engine_arguments: Mapping[str, Any]
    """Constructor arguments of the engine by name; empty if unknown."""
    engine_dtype: Dtype
    """Dtype that the engine computes in."""
    quantized: bool
    """Whether the engine's weights are quantised, so that none can be sent."""
    trainer_dtype: Dtype
    """Dtype that the trainer computes in, mixed precision included."""
    attention: Attention
    """Attention kernel of the trainer's policy."""
    sampling: SamplingConfig
    """Sampling settings of the audited rows."""
    lora: bool
    """Whether the policy has LoRA adapters."""
    experts: bool
    """Whether the policy is a mixture of experts."""
    prompts_changed: bool
    """Whether the engine consumed other prompt ids than it was sent."""
    weights_proven: bool
    """Whether checksums prove that the engine sampled with the trainer's weights, all of them."""
    engine_temperature: float
    """Temperature at which the trainer's logits come closest to the engine's log-probabilities."""
    trainer_temperature: float
    """Temperature at which training actually scores."""
    supports: tuple[SamplingSupport, ...]
    """The smallest sampling supports that hold every sampled token, where they exclude any token."""

    @property
    def other_attention(self) -> Attention:
        """Another attention kernel, to compare with the trainer's."""
        return "sdpa" if self.attention == "eager" else "eager"

    def engine_yaml(self, setting: str) -> str:
        """Return YAML that changes one engine argument and leaves the others alone."""
        return f"data:\n  engine:\n    class_path: {self.engine_class}\n    init_args: {{{setting}}}"


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """One change that removes a factor."""

    key: str
    """Key of the factor, e.g. "kv_cache_dtype"; of several toggles with one key the one that explains most counts."""
    title: str
    """Name of the factor for people."""
    side: Side
    """The side that has this setting."""
    change: str
    """What the toggle changes, e.g. "fp8 -> auto"."""
    remedy: str
    """YAML that fixes the factor, or YAML comments that say what to do."""
    engine_fields: Mapping[str, Any] | None = None
    """Fields of EngineCondition to set; `args` is merged. None: the engine's side does not change."""
    trainer_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of TrainerCondition to set; empty: none."""

    def disruption(self, condition: Condition) -> int:
        """Return what the change does to the engine that sampled: 0, nothing; 1, sends it weights; 2, closes it."""
        engine = self.apply(condition).engine
        if engine is None or (engine.weights == "held" and not engine.args):
            return 0
        return 1 if engine.weights == "sent" and not engine.args else 2

    def apply(self, condition: Condition) -> Condition:
        """Return `condition` with the change applied."""
        engine = condition.engine
        if self.engine_fields is not None:
            engine = engine or EngineCondition()
            fields = dict(self.engine_fields)
            fields["args"] = tuple(sorted((dict(engine.args) | dict(fields.get("args", ()))).items()))
            engine = dataclasses.replace(engine, **fields)
        return Condition(engine=engine, trainer=dataclasses.replace(condition.trainer, **self.trainer_fields))


def toggles(pipeline: Pipeline) -> list[Toggle]:
    """Return every toggle that could change something in `pipeline`, the smallest intervention first."""
    return [
        *_inputs(pipeline),
        *_engine_state(pipeline),
        *_distribution(pipeline),
        *_trainer_computation(pipeline),
        *_engine_precision(pipeline),
        *_both(pipeline),
    ]


def _inputs(pipeline: Pipeline) -> Iterator[Toggle]:
    if pipeline.prompts_changed:
        yield Toggle(
            key="prompt_ids",
            title="prompt ids (chat template, special tokens)",
            side="engine",
            change="trainer scores after the ids that the engine consumed",
            remedy="# give the engine token ids (prompt_token_ids), not text that it tokenises or templates again",
            trainer_fields={"consumed_prompts": True},
        )


def _engine_state(pipeline: Pipeline) -> Iterator[Toggle]:
    yield Toggle(
        key="prefix_cache",
        title="prefix cache",
        side="engine",
        change="no cached block is read",
        remedy=pipeline.engine_yaml("engine_args: {enable_prefix_caching: false}")
        + "  # or reset the cache after every weight sync (reset_prefix_cache)",
        engine_fields={"read_prefix_cache": False},
    )
    yield Toggle(
        key="batch_shape",
        title="batch shape",
        side="engine",
        change="one request at a time",
        remedy=pipeline.engine_yaml("max_num_seqs: 1") + "  # slow; on a GPU rather set VLLM_BATCH_INVARIANT=1",
        engine_fields={"batch_size": 1, "read_prefix_cache": False},
    )
    if pipeline.lora:
        yield Toggle(
            key="lora_merge",
            title="LoRA merge",
            side="engine",
            change="trainer without its adapters",
            remedy="# the engine samples with the base alone: merge the adapters on the way into it (WeightSync does)",
            trainer_fields={"adapters": 0.0},
        )
        yield Toggle(
            key="lora_merge",
            title="LoRA merge",
            side="engine",
            change="trainer with its adapters twice",
            remedy="# the adapters were merged into the base once too often: merge on the way, never in place",
            trainer_fields={"adapters": 2.0},
        )
    sync = "# weight_sync: {verify: checksum}  stops the run at the first weight that did not arrive"
    what = ("lora_merge", "LoRA merge") if pipeline.lora else ("weights", "stale or partly synced weights")
    if pipeline.weights_proven:
        return
    if not pipeline.quantized:
        yield Toggle(
            key=what[0],
            title=what[1],
            side="engine",
            change="the trainer's weights sent once more",
            remedy=sync,
            engine_fields={"weights": "sent"},
        )
    yield Toggle(
        key=what[0],
        title=what[1],
        side="engine",
        change="engine started from the trainer's weights",
        remedy=sync,
        engine_fields={"weights": "files"},
    )


def _distribution(pipeline: Pipeline) -> Iterator[Toggle]:
    neutral = SamplingConfig()
    filters = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    changed = {name: value for name in filters if (value := getattr(pipeline.sampling, name)) != getattr(neutral, name)}
    title = "sampling processors (top-p, top-k, min-p, penalties)"
    if changed:
        yield Toggle(
            key="sampling_processors",
            title=title,
            side="engine",
            change=", ".join(f"{name} {value:g} -> {getattr(neutral, name):g}" for name, value in changed.items()),
            remedy="data:\n  sampling: {" + ", ".join(f"{name}: {getattr(neutral, name)}" for name in changed) + "}",
            engine_fields={"neutral_sampling": True},
        )
    for support in () if changed else pipeline.supports:
        bound = f"top_k {support.top_k}" if support.top_k else f"top_p {support.top_p:g}"
        yield Toggle(
            key="sampling_processors",
            title=title,
            side="engine",
            change=f"trainer renormalised over {bound}, which holds every sampled token",
            remedy="# the engine filters although data.sampling does not ask for it: look for sampling defaults in\n"
            "# the model's generation_config.json or in the engine's arguments",
            trainer_fields={"support": support},
        )
    configured = pipeline.sampling.temperature
    title = "temperature and log-probability semantics"
    if pipeline.trainer_temperature != configured:
        yield Toggle(
            key="temperature",
            title=title,
            side="trainer",
            change=f"trainer scores at temperature {configured:g}, not {pipeline.trainer_temperature:g}",
            remedy="# training scores at another temperature than data.sampling.temperature: model.temperature must\n"
            "# be linked to it, and the logits divided by it once",
            trainer_fields={"arrangement": "single_rows"},
        )
    elif pipeline.engine_temperature != configured:
        yield Toggle(
            key="temperature",
            title=title,
            side="engine",
            change=f"trainer scores at temperature {pipeline.engine_temperature:g}, not {configured:g}",
            remedy="# the engine's log-probabilities are of another temperature than data.sampling.temperature:\n"
            "# it must report processed ones (logprobs_mode: processed_logprobs), or was started with another one",
            trainer_fields={"temperature": pipeline.engine_temperature},
        )


def _trainer_computation(pipeline: Pipeline) -> Iterator[Toggle]:
    yield Toggle(
        key="padding",
        title="padding and position ids",
        side="trainer",
        change="every row alone, without padding",
        remedy="# the trainer scores padded rows otherwise than single ones: right-pad, or pass attention_mask and\n"
        "# position_ids; until then model.micro_batch_tokens: 1 scores row by row",
        trainer_fields={"arrangement": "single_rows"},
    )
    other = pipeline.other_attention
    yield Toggle(
        key="attention",
        title="attention kernel",
        side="trainer",
        change=f"{pipeline.attention} -> {other}",
        remedy=f"model: {{attn_implementation: {other}}}",
        trainer_fields={"attention": other},
    )
    if pipeline.experts:
        yield Toggle(
            key="moe_routing",
            title="mixture-of-experts routing",
            side="both",
            change="trainer takes the engine's router logits",
            remedy="# the two route tokens to other experts: compute the router in float32 on both sides, e.g.\n"
            + pipeline.engine_yaml("dtype: float32"),
            trainer_fields={"engine_routing": True, "arrangement": "single_rows"},
            engine_fields={"read_prefix_cache": False},
        )


def _engine_precision(pipeline: Pipeline) -> Iterator[Toggle]:
    own = pipeline.engine_arguments
    if (cache := own.get("kv_cache_dtype", "auto")) != "auto":
        yield _argument(pipeline, "kv_cache_dtype", "key-value cache dtype", cache, "auto")
    if (quantization := own.get("quantization")) is not None:
        yield _argument(pipeline, "quantization", "quantised weights", quantization, None)
    for name, value in sorted((own.get("engine_args") or {}).items()):
        left = {other: setting for other, setting in own["engine_args"].items() if other != name}
        yield Toggle(
            key=f"engine_args.{name}",
            title=f"engine argument {name}",
            side="engine",
            change=f"{value} -> vLLM's default",
            remedy=pipeline.engine_yaml(f"engine_args: {json.dumps(left)}"),
            engine_fields={"args": (("engine_args", left),)},
        )
    if own.get("enforce_eager") is False:
        yield _argument(pipeline, "enforce_eager", "compiled graphs", "graphs", True)
    if pipeline.engine_dtype != "float32":
        yield _argument(
            pipeline, "engine_dtype", "the engine's dtype", pipeline.engine_dtype, "float32", argument="dtype"
        )


def _both(pipeline: Pipeline) -> Iterator[Toggle]:
    trainer = {"dtype": "float32"}
    if pipeline.trainer_dtype == "float32":
        return
    yield Toggle(
        key="trainer_dtype",
        title="the trainer's dtype",
        side="trainer",
        change=f"{pipeline.trainer_dtype} -> float32",
        remedy="model: {dtype: float32}\ntrainer: {precision: 32-true}",
        trainer_fields=trainer,
    )
    if pipeline.engine_dtype != "float32":
        yield Toggle(
            key="precision",
            title="the precision of both sides",
            side="both",
            change=f"{pipeline.engine_dtype} and {pipeline.trainer_dtype} -> float32",
            remedy="model: {dtype: float32}\n" + pipeline.engine_yaml("dtype: float32"),
            engine_fields={"args": (("dtype", "float32"),)},
            trainer_fields=trainer,
        )


def _argument(
    pipeline: Pipeline, key: str, title: str, old: object, new: object, argument: str | None = None
) -> Toggle:
    argument = argument or key
    shown = {None: "null", True: "true"}.get(new, new) if isinstance(new, bool | None) else new
    return Toggle(
        key=key,
        title=title,
        side="engine",
        change=f"{old} -> {shown}",
        remedy=pipeline.engine_yaml(f"{argument}: {shown}"),
        engine_fields={"args": ((argument, new),)},
    )
