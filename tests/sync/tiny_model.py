"""A random Llama of under a million parameters, with a tokenizer, in a folder: no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from app.engine.protocol import Engine
from app.sync.canary import canary_requests
from app.sync.synchroniser import WeightSynchroniser
from app.types import Request
from app.weights.checksum import checksum
from app.weights.gather import tied_names
from app.world import World

VOCAB_SIZE = 300
"""Not a multiple of 64, so vLLM pads the embedding."""
EOS_IDS = (1, 5, 7)
"""The tokenizer's, then two that only the generation config and the model config know."""


def save_tiny(folder: Path, tie: bool = True) -> Path:
    """Save the model and return its folder; the weights are spread enough for logprobs to differ between tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        bos_token_id=0,
        eos_token_id=EOS_IDS[2],
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [EOS_IDS[1], EOS_IDS[2]]
    model.save_pretrained(folder)
    # Transformers may write one file's end tokens over the other's: state both plainly.
    for name, value in (("config.json", EOS_IDS[2]), ("generation_config.json", [EOS_IDS[1], EOS_IDS[2]])):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": value}))
    words = {"<s>": 0, "</s>": EOS_IDS[0], "<unk>": 2, **{f"w{i}": i for i in range(3, VOCAB_SIZE)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def save_tiny_experts(folder: Path) -> Path:
    """Save a random Qwen3 mixture of four experts and return its folder."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=EOS_IDS[0],
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def load_tiny(folder: Path) -> LlamaForCausalLM:
    """Return the model as a float32 trainer would hold it."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def perturb(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Move every parameter a little, as an optimiser step would; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def expected(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Return the checksums an engine should report, tied names included."""
    sums = {name: checksum(parameter, dtype) for name, parameter in model.named_parameters()}
    return sums | {name: sums[owner] for name, owner in tied_names(model).items()}


def random_requests(vocab_size: int = VOCAB_SIZE, rows: int = 4, length: int = 40, seed: int = 0) -> list[Request]:
    """Return canary requests of random ids, longer than a cache block, so that a stale prefix cache would be read."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(vocab_size, (rows, length), generator=generator).tolist()
    return canary_requests(prompts, seed, rows)


def synchroniser_of(engine: Engine, **settings: Any) -> WeightSynchroniser:
    """Return what sends weights to `engine`, with a canary of random ids."""
    return WeightSynchroniser(engine, World(), requests=random_requests(), **settings)


def score(
    model: LlamaForCausalLM, rows: list[tuple[tuple[int, ...], tuple[int, ...]]], temperature: float = 1.0
) -> list[list[float]]:
    """Return each completion token's log-probability, one row at a time and without any padding."""
    scored = []
    for prompt, completion in rows:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double()
        logprobs = (logits / temperature).log_softmax(-1)
        scored.append([float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)])
    return scored
