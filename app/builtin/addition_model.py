"""The built-in model lockstep/addition-1m: a small Llama that adds two numbers right about 45 times in 100.

It is made on first use: random weights, then supervised steps on answers of a careless teacher, who forgets the carry
from the ones in most sums. So the model has seen how to add but has a bad habit, as pretrained models do, and GRPO
can cure it. The folder is an ordinary Hugging Face one, so engine and trainer load it like any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, processors
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app.builtin.addition import careless_sum, pairs, row

NAME = "addition-1m"
VERSION = 1
"""Raise it with every change here that changes the files made: old cached models are then not used."""
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
IGNORED = -100
"""Label of a position that is not trained on: the prompt and the padding."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the model, but for library versions."""

    hidden_size: int = 192
    """Width of the residual stream. The heads' width is 32, which vLLM's attention accepts on every device."""
    intermediate_size: int = 576
    """Inner width of the feed-forward layers."""
    layers: int = 2
    """Number of transformer blocks."""
    heads: int = 6
    """Number of query heads."""
    key_value_heads: int = 2
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    initializer_range: float = 0.05
    """Standard deviation of the initial weights."""
    rope_theta: float = 100.0
    """Base of the rotary positions; sequences have eleven tokens."""
    seed: int = 0
    """Seed of the initial weights and of the warm-up's draws."""
    batch_size: int = 256
    """Sums per supervised step."""
    learning_rate: float = 3e-3
    """AdamW's peak, after `learning_rate_warmup` steps of linear rise; it falls linearly to a twentieth."""
    learning_rate_warmup: int = 20
    """Steps of the rise."""
    forgotten_carries: float = 0.65
    """Share of the teacher's answers in which the carry from the ones is forgotten."""
    min_steps: int = 250
    """Supervised steps; then it goes on until the exact match is in range."""
    max_steps: int = 400
    """Steps after which the warm-up is given up."""
    exact_match_low: float = 0.40
    """Least exact match on held-out sums at the end ..."""
    exact_match_high: float = 0.50
    """... and the largest."""


def ensure_addition_model(cache_dir: Path | None = None, recipe: Recipe | None = None) -> Path:
    """Return the folder of the built-in model, making it on first use (under a minute on two cores).

    Processes that ask at the same time wait for the one that makes it. The folder appears whole or not at all. The
    caller's random state is left as it was.

    Args:
        cache_dir: where models are kept; None: $LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep.
        recipe: another recipe, for tests.

    Raises:
        RuntimeError: if the warm-up does not end within `max_steps`.
    """
    recipe = recipe or Recipe()
    cache_dir = cache_dir or default_cache_dir()
    folder = cache_dir / f"{NAME}-{fingerprint(recipe)}"
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
            make(unfinished, recipe)
            unfinished.rename(folder)
    return folder


def default_cache_dir() -> Path:
    """$LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep. An empty variable counts as unset."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"


def fingerprint(recipe: Recipe) -> str:
    """Twelve hex digits of everything that decides the files: recipe, `VERSION` and torch (its kernels, its draws)."""
    content = {"recipe": dataclasses.asdict(recipe), "version": VERSION, "torch": torch.__version__}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def make(folder: Path, recipe: Recipe) -> None:
    """Write a warmed-up model and its tokenizer to `folder`."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, tokenizer)
    warm_up(model, tokenizer, recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; characters other than digits, + and = are <unk>. The template adds no words."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()  # without it decoding puts a space between characters
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A float32 Llama with random weights from the global generator. The embedding is also the output layer."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=64,
        initializer_range=recipe.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> int:
    """Train on the careless teacher's answers until the exact match on held-out sums is in the recipe's range.

    Returns:
        The number of supervised steps taken.

    Raises:
        RuntimeError: if the range is not met within `max_steps`.
    """
    right = encode([(a, b, a + b) for a, b in pairs("train")], tokenizer)
    careless = encode([(a, b, careless_sum(a, b)) for a, b in pairs("train")], tokenizer)
    held_out_ids, held_out_labels = encode([(a, b, a + b) for a, b in pairs("warm_up_stop")], tokenizer)
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: _rate(done, recipe))
    model.train()
    with tqdm(range(1, recipe.max_steps + 1), desc=f"making lockstep/{NAME} (once)", unit="step") as progress:
        for step in progress:
            drawn = torch.randint(len(right[0]), (recipe.batch_size,), generator=generator)
            forgets = torch.rand(recipe.batch_size, 1, generator=generator) < recipe.forgotten_carries
            ids, labels = (torch.where(forgets, b[drawn], a[drawn]) for a, b in zip(right, careless, strict=True))
            logits = model(input_ids=ids).logits[:, :-1]
            loss = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 10 and step < recipe.min_steps:
                continue
            score = exact_match(model, held_out_ids, held_out_labels)
            progress.set_postfix(loss=f"{loss.item():.2f}", exact_match=f"{score:.2f}", refresh=False)
            if step >= recipe.min_steps and recipe.exact_match_low <= score <= recipe.exact_match_high:
                return step
    raise RuntimeError(
        f"lockstep/{NAME}: after {recipe.max_steps} supervised steps the exact match is {score:.2f}, not between "
        f"{recipe.exact_match_low} and {recipe.exact_match_high}; use another recipe, for instance another seed"
    )


def _rate(done: int, recipe: Recipe) -> float:
    """Learning rate after `done` steps, as a share of its peak."""
    return min(1.0, (done + 1) / recipe.learning_rate_warmup) * max(0.05, 1 - done / recipe.min_steps)


def encode(sums: Iterable[tuple[int, int, int]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels of (left, right, answer), both [B, S] int64, right-padded to the longest possible sum.

    The answer and its end-of-sequence token are labelled.
    """
    longest = encode_row(tokenizer, 99, 99, 198)[0].shape[0]
    rows = [encode_row(tokenizer, *terms) for terms in sums]
    ids = torch.stack([F.pad(i, (0, longest - len(i)), value=tokenizer.pad_token_id) for i, _ in rows])
    return ids, torch.stack([F.pad(labels, (0, longest - len(labels)), value=IGNORED) for _, labels in rows])


def encode_row(tokenizer: PreTrainedTokenizerFast, left: int, right: int, answer: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels of one sum, both [S]."""
    encoded: Any = tokenizer.apply_chat_template(
        row(left, right)["prompt"], add_generation_prompt=True, return_dict=True
    )
    prompt = encoded["input_ids"]
    reply = [*tokenizer(str(answer), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor([*prompt, *reply]), torch.tensor([IGNORED] * len(prompt) + reply)


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> float:
    """Share of rows that greedy decoding gets right, to the last token, by one forward pass.

    Greedy decoding yields the answer exactly if each answer token is the likeliest after the right tokens before it.

    Args:
        model: the model to score.
        ids: [B, S] from `encode`.
        labels: [B, S] from `encode`.
    """
    guesses = model(input_ids=ids[:, :-1]).logits.argmax(-1)
    return ((guesses == labels[:, 1:]) | (labels[:, 1:] == IGNORED)).all(1).double().mean().item()
