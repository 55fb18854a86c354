"""A tiny model and a fake engine for unit tests. Whatever claims to train is tested with the real engines instead."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from docstring_parser.attrdoc import AttributeDocstrings
from hypothesis import HealthCheck, settings
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app.engine.protocol import Engine
from app.engine.weight_layout import WeightLayout
from app.types import Completion

# On a busy machine an example may take its time.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and a chat template."""
    special = ["<pad>", "<eos>", "<user>", "<assistant>"]
    vocabulary = {token: i for i, token in enumerate([*special, *"0123456789+-*= abcdefghijklmnopqrstuvwxyz"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_llama(vocabulary: int, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama of two layers with a tied head."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.2,  # far from uniform, so that a wrong weight or position shows
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
    )


@pytest.fixture(scope="session", autouse=True)
def sources_read_once() -> Iterator[None]:
    """The command line's parser looks for the docstrings of fields in every class's source, for every subcommand."""
    read = AttributeDocstrings.get_attr_docs
    found = functools.cache(lambda component: read(AttributeDocstrings(), component))
    with patch.object(AttributeDocstrings, "get_attr_docs", lambda self, component: found(component)):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of the tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class FakeEngine(Engine):
    """Samples uniformly from the request's seed; remembers what it was asked and sent."""

    def __init__(self, vocabulary: int = 40, longest: int = 6) -> None:
        self.vocabulary = vocabulary
        self.longest = longest
        self.policy_version = 0
        self.asked: list = []

    def start(self, model_path, seed):
        self.started = True

    def generate(self, requests, sampling):
        self.asked.append(list(requests))
        return [self._complete(request, sampling) for request in requests]

    def _complete(self, request, sampling):
        generator = torch.Generator().manual_seed(request.seed)
        length = int(torch.randint(1, min(self.longest, sampling.max_tokens) + 1, (1,), generator=generator))
        ids = torch.randint(4, self.vocabulary, (length,), generator=generator).tolist()
        logprob = -float(torch.tensor(self.vocabulary - 4).log())
        return Completion(token_ids=tuple(ids), logprobs=(logprob,) * length, finish_reason="length")

    def load_weights(self, weights, policy_version):
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.policy_version = policy_version

    def checksums(self):
        return {}

    def weight_layout(self):
        return WeightLayout(shapes={}, dtypes={})

    def close(self):
        pass


@pytest.fixture
def fake_engine() -> FakeEngine:
    return FakeEngine()
