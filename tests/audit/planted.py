"""Faults planted one by one into a tiny pipeline with the real vLLM, and the audit's verdict on each.

    python -m tests.audit.planted            # every fault at every strength, a table; about 5 minutes

Each audit is the command line's own: `python -m app audit --config ...`, run in this process so that faults can be put
into the trainer's side too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from transformers import PreTrainedModel

import app.audit.command
import app.audit.run
from app.audit.report.json import from_json
from app.audit.sides.trainer_side import Scoring, TrainerSide
from app.audit.types import Audit
from app.cli import main
from app.engine.protocol import Engine
from app.training.module import GRPOModule
from tests.audit.plants_trainer import (
    merged_weights,
    padded_scoring,
    scoring_at,
    spread_adapters,
    wrong_attention,
    wrong_router,
)
from tests.conftest import tiny_llama, tiny_tokenizer
from tests.sync.tiny_model import save_tiny_experts

Plant = Callable[[PreTrainedModel], contextlib.AbstractContextManager[Any]]
Weights = Callable[[PreTrainedModel], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault at one strength."""

    factor: str
    """Key of the factor that the audit must name first."""
    name: str
    """What is planted, with its strength."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Configuration, by dotted key."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of PlantedEngine."""
    policy: Plant | None = None
    """Put into the policy for the time of the audit."""
    scoring: Scoring | None = None
    """What training scores with."""
    sent: Weights | None = None
    """What the engine is sent in the place of the trainer's weights."""
    experts: bool = False
    """Whether the model is a mixture of experts."""


def _adapted(size: float, factor: float) -> dict[str, Any]:
    @contextlib.contextmanager
    def trained(policy: PreTrainedModel) -> Iterator[None]:
        spread_adapters(policy, size)
        yield

    return {
        "settings": {"model.lora": {"r": 4, "lora_alpha": 8}},
        "policy": trained,
        "sent": partial(merged_weights, factor=factor),
    }


def _planted(plant: str, strength: float, **more: Any) -> dict[str, Any]:
    return {"engine": {"plant": plant, "strength": strength, **more}}


COOL = {"data.sampling.temperature": 0.7}
FAULTS: dict[str, list[Fault]] = {
    "temperature and log-probability semantics": [
        Fault(factor="temperature", name="raw log-probabilities", settings=COOL, **_planted("raw_logprobs", 1.0)),
        Fault(factor="temperature", name="reported at T^0.8", settings=COOL, **_planted("raw_logprobs", 0.2)),
        Fault(factor="temperature", name="trainer at 1.3 T", scoring=scoring_at(1.3)),
        Fault(factor="temperature", name="trainer at 0.95 T", scoring=scoring_at(0.95)),
    ],
    "sampling processors": [
        Fault(factor="sampling_processors", name="top_p 0.8", settings={"data.sampling.top_p": 0.8}),
        Fault(factor="sampling_processors", name="top_k 20", settings={"data.sampling.top_k": 20}),
        Fault(factor="sampling_processors", name="penalty 1.2", settings={"data.sampling.repetition_penalty": 1.2}),
        Fault(factor="sampling_processors", name="top_k 5 that nobody asked for", **_planted("top_k", 5)),
        Fault(factor="sampling_processors", name="top_p 0.9 that nobody asked for", **_planted("top_p", 0.9)),
    ],
    "the engine's dtype": [
        Fault(factor="engine_dtype", name="bfloat16", engine={"dtype": "bfloat16"}),
        Fault(factor="engine_dtype", name="float16", engine={"dtype": "float16"}),
    ],
    "the trainer's dtype": [
        Fault(factor="trainer_dtype", name="bfloat16", settings={"model.dtype": "bfloat16"}),
        Fault(factor="trainer_dtype", name="bf16-mixed", settings={"trainer.precision": "bf16-mixed"}),
    ],
    "attention kernel": [
        Fault(factor="attention", name="scale 5 % off", policy=partial(wrong_attention, scale_error=0.05)),
        Fault(factor="attention", name="scale 1 % off", policy=partial(wrong_attention, scale_error=0.01)),
        Fault(
            factor="attention", name="bfloat16 softmax", policy=partial(wrong_attention, probabilities=torch.bfloat16)
        ),
    ],
    "key-value cache dtype": [
        Fault(factor="kv_cache_dtype", name="fp8", engine={"kv_cache_dtype": "fp8"}),
        Fault(factor="kv_cache_dtype", name="fp8_e5m2", engine={"kv_cache_dtype": "fp8_e5m2"}),
        Fault(
            factor="kv_cache_dtype",
            name="fp8 under bfloat16 on both sides",
            engine={"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
            settings={"model.dtype": "bfloat16"},
        ),
    ],
    "quantised weights": [
        Fault(
            factor="quantization",
            name="fp8_per_channel, bfloat16",
            engine={"quantization": "fp8_per_channel", "dtype": "bfloat16"},
            settings={"model.dtype": "bfloat16"},
        ),
    ],
    "prefix cache": [
        Fault(factor="prefix_cache", name="older by 0.3 σ", **_planted("stale_prefix_cache", 0.3)),
        Fault(factor="prefix_cache", name="older by 0.01 σ", **_planted("stale_prefix_cache", 0.01)),
    ],
    "batch shape": [
        Fault(factor="batch_shape", name="noise of 0.1 nats", **_planted("batch_noise", 0.1)),
        Fault(factor="batch_shape", name="noise of 0.01 nats", **_planted("batch_noise", 0.01)),
    ],
    "padding and positions": [
        Fault(factor="padding", name="1 column unmasked", scoring=padded_scoring(columns=1)),
        Fault(factor="padding", name="completions 1 position late", scoring=padded_scoring(completion_shift=1)),
    ],
    "stale or partly synced weights": [
        Fault(factor="weights", name="all older by 0.02 σ", **_planted("older_weights", 0.02, faulty_syncs=1)),
        Fault(factor="weights", name="one layer never sent", **_planted("older_weights", 0.3, names=r"layers\.1\.mlp")),
        Fault(factor="weights", name="q_proj alone", **_planted("older_weights", 0.1, names=r"0\.self_attn\.q_proj")),
    ],
    "chat template and prompt ids": [
        Fault(factor="prompt_ids", name="first token twice", **_planted("repeated_first_token", 1)),
        Fault(factor="prompt_ids", name="last token lost", **_planted("cut_prompt", 1)),
    ],
    "LoRA merge": [
        Fault(factor="lora_merge", name="base alone", **_adapted(0.05, 0.0)),
        Fault(factor="lora_merge", name="merged twice", **_adapted(0.05, 2.0)),
        Fault(factor="lora_merge", name="base alone, small adapters", **_adapted(0.005, 0.0)),
    ],
    "mixture-of-experts routing": [
        Fault(factor="moe_routing", name="engine's router, noise 0.1", experts=True, **_planted("router_noise", 0.1)),
        Fault(factor="moe_routing", name="engine's router, noise 0.01", experts=True, **_planted("router_noise", 0.01)),
        Fault(factor="moe_routing", name="trainer's router", experts=True, policy=partial(wrong_router, noise=0.05)),
    ],
}
"""By the factor's name for people; the first of each is in the tests, the others are for the table."""


def save_models(folder: Path) -> None:
    """Write a dense model, a mixture of experts, and prompts longer than a block of the prefix cache."""
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder / "dense")
    save_tiny_experts(folder / "experts")
    for name in ("dense", "experts"):
        tokenizer.save_pretrained(folder / name)
    texts = [f"{number * 7919:040d}+{number:02d}=" for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def audit(folder: Path, fault: Fault, out: Path) -> Audit:
    """Audit the pipeline of `save_models` with a fault in it."""
    model = folder / ("experts" if fault.experts else "dense")
    engine = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 32 << 20, **fault.engine}
    settings: dict[str, Any] = {
        "model.model_name_or_path": str(model),
        "data.train.path": str(folder / "prompts.jsonl"),
        "data.sampling.max_tokens": 16,
        "data.engine": {"class_path": "tests.audit.plants_engine.PlantedEngine", "init_args": engine},
        "trainer.accelerator": "cpu",
        "trainer.default_root_dir": str(out),
        "trainer.logger": False,
        **fault.settings,
    }
    out.mkdir(parents=True, exist_ok=True)
    config = out / "audit.yaml"
    config.write_text(yaml.safe_dump(_nested(settings)))
    with ExitStack() as stack:
        _plant(stack, fault)
        main(["audit", "--config", str(config), "--rows", "24", "--out", str(out)])
    return from_json((out / "audit.json").read_text())


def _plant(stack: ExitStack, fault: Fault) -> None:
    if fault.scoring is not None:
        stack.enter_context(patch.object(app.audit.run, "TrainerSide", partial(TrainerSide, scoring=fault.scoring)))
    if fault.policy is not None:
        set_up, plant = app.audit.command.set_up, fault.policy

        def planted_set_up(module: GRPOModule, checkpoint: Path | None) -> None:
            set_up(module, checkpoint)
            stack.enter_context(plant(module.policy))

        stack.enter_context(patch.object(app.audit.command, "set_up", planted_set_up))
    if fault.sent is not None:
        wrong = fault.sent

        def send(work: Any, engine: Engine) -> None:
            engine.load_weights(wrong(work.module.policy).items(), 0)

        stack.enter_context(patch.object(app.audit.run._Audit, "_send", send))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        place = nested
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return nested


def named_first(found: Audit) -> str:
    """Return the key of the likeliest cause, or the verdict if there is none."""
    return found.rounds[0].factors[0].key if found.rounds and found.rounds[0].factors else found.verdict


def table() -> None:
    """Audit every fault and print what was named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="factors whose name contains this")
    asked = parser.parse_args()
    right = total = 0
    print(f"{'planted':<45} {'mean |l|':>9} {'k3':>9}  {'share':>6}  named first", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        for factor, faults in FAULTS.items():
            for number, fault in enumerate(faults):
                if asked.only and asked.only not in factor:
                    continue
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    found = audit(Path(folder), fault, Path(folder) / f"{fault.factor}-{number}")
                named = named_first(found)
                distance = found.comparison.distance
                share = found.rounds[0].factors[0].share if found.rounds else 0.0
                good = named == fault.factor
                right, total = right + good, total + 1
                print(
                    f"{f'{fault.factor}: {fault.name}':<45} {distance.mean_abs:9.2g} {distance.k3:9.2g}  {share:6.0%}"
                    f"  {named}{'' if good else '   WRONG'}",
                    flush=True,
                )
    print(f"{right} of {total} right")


if __name__ == "__main__":
    table()
