"""The built-in model lockstep/addition-1m: a small Llama that adds two numbers right about 45 times in 100.

It is made on first use: random weights, then supervised steps on the training split until it is half good, and no
further. GRPO does the rest. The folder is an ordinary Hugging Face one, so engine and trainer load it like any other.
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

import torch
import torch.nn.functional as F
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, processors
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app.data.addition import pairs, row

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
    """Transformer blocks."""
    heads: int = 6
    """Query heads."""
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
    learning_rate: float = 2e-3
    """AdamW's, after `learning_rate_warmup` steps of linear rise."""
    learning_rate_warmup: int = 20
    """Steps of the rise."""
    exact_match_low: float = 0.42
    """The warm-up ends at the first step whose exact match on held-out sums is at least this ..."""
    exact_match_high: float = 0.48
    """... and at most this; a step that jumps over the range does not end it."""
    max_steps: int = 600
    """Supervised steps after which the warm-up is given up."""


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
    """Train on sums of the training split until the exact match on held-out sums is in the recipe's range.

    Returns:
        The number of supervised steps taken.

    Raises:
        RuntimeError: if the range is not met within `max_steps`.
    """
    train_ids, train_labels = encode(pairs("train"), tokenizer)
    held_out_ids, held_out_labels = encode(pairs("warm_up_stop"), tokenizer)
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1, (done + 1) / recipe.learning_rate_warmup)
    )
    model.train()
    with tqdm(range(1, recipe.max_steps + 1), desc=f"making lockstep/{NAME} (once)", unit="step") as progress:
        for step in progress:
            drawn = torch.randint(len(train_ids), (recipe.batch_size,), generator=generator)
            logits = model(input_ids=train_ids[drawn]).logits[:, :-1]
            loss = F.cross_entropy(logits.transpose(1, 2), train_labels[drawn, 1:], ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            score = exact_match(model, held_out_ids, held_out_labels)
            progress.set_postfix(loss=f"{loss.item():.2f}", exact_match=f"{score:.2f}", refresh=False)
            if recipe.exact_match_low <= score <= recipe.exact_match_high:
                return step
    raise RuntimeError(
        f"lockstep/{NAME}: after {recipe.max_steps} supervised steps the exact match is {score:.2f}, not between "
        f"{recipe.exact_match_low} and {recipe.exact_match_high}; use another recipe, for instance another seed"
    )


def encode(sums: Iterable[tuple[int, int]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [B, S] int64, right-padded; the answer and its end-of-sequence token are labelled."""
    ids, labels = [], []
    for left, right in sums:
        data = row(left, right)
        prompt = tokenizer.apply_chat_template(data["prompt"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        answer = tokenizer(data["answer"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids.append(torch.tensor([*prompt, *answer]))
        labels.append(torch.tensor([IGNORED] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=IGNORED),
    )


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
