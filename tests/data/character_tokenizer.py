"""A character tokenizer built in memory: it needs no download and its ids can be read off by hand."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNKNOWN = "<s>", "</s>", "<pad>", "<unk>"
VOCABULARY = {token: i for i, token in enumerate([PAD, BOS, EOS, UNKNOWN, *string.printable])}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools\nhere') }}{% endif %}"
    "{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}{{ mark | default('a') }}:{% endif %}"
)


def character_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a character; it puts BOS before plain text, as Llama's does, and so does its chat template."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN
    )
    fast.chat_template = chat_template
    return fast


def ids(text: str, bos: bool = True) -> tuple[int, ...]:
    """The ids by hand: BOS, then one id a character."""
    return (VOCABULARY[BOS],) * bos + tuple(VOCABULARY[character] for character in text)
