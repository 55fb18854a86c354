from __future__ import annotations

import warnings
from typing import Any

import pytest

from app.data.prompts import tokenize_prompts
from app.data.sources import DataError
from tests.data.character_tokenizer import character_tokenizer, ids

USER = [{"role": "user", "content": "hi"}]


def tokenize(*prompts: Any, limit: int = 100, chat_template: bool = True, **options: Any) -> list[Any]:
    tokenizer = character_tokenizer() if chat_template else character_tokenizer(None)
    rows = [{"prompt": prompt, "answer": i} for i, prompt in enumerate(prompts)]
    return tokenize_prompts(rows, tokenizer, limit, "data.jsonl", **options)


def test_text_is_tokenised_as_it_is_with_the_tokenizers_special_tokens() -> None:
    first, second = tokenize("1+1=", "ab c")
    assert first.token_ids == ids("1+1=")
    assert second.token_ids == ids("ab c")
    assert (second.row, second.prompt, second.columns) == (1, "ab c", {"answer": 1})


def test_chat_goes_through_the_template_once_with_a_generation_prompt_and_one_bos() -> None:
    (prompt,) = tokenize(USER)
    assert prompt.token_ids == ids("u:hi;a:")
    assert all(type(token) is int for token in prompt.token_ids)
    assert prompt.prompt == USER


def test_text_and_chat_rows_keep_their_order() -> None:
    prompts = tokenize("x", USER, "y")
    assert [prompt.token_ids for prompt in prompts] == [ids("x"), ids("u:hi;a:"), ids("y")]
    assert [prompt.row for prompt in prompts] == [0, 1, 2]


def test_text_that_brings_its_own_bos_gets_no_second_one() -> None:
    assert tokenize("<s>ab")[0].token_ids == ids("ab")


def test_template_arguments_are_passed_on() -> None:
    assert tokenize(USER, chat_template_kwargs={"mark": "m"})[0].token_ids == ids("u:hi;m:")


def test_chat_without_a_chat_template() -> None:
    with pytest.raises(DataError, match=r"^data.jsonl row 1: the prompt is a chat, but the tokenizer has no chat"):
        tokenize("x", USER, chat_template=False)


def test_template_that_refuses_the_messages_is_named_in_one_line() -> None:
    with pytest.raises(
        DataError, match=r"^data.jsonl row 1: the chat template refuses .*TemplateError: no tools here$"
    ):
        tokenize("x", [*USER, {"role": "tool", "content": "4"}])


def test_the_limit_counts_special_tokens_and_is_inclusive() -> None:
    assert tokenize("abcd", limit=5)[0].token_ids == ids("abcd")
    with pytest.raises(DataError, match=r"^data.jsonl row 1: the prompt has 6 tokens, the limit is 5"):
        tokenize("abcd", "abcde", limit=5)


def test_dropped_prompts_are_counted_in_one_warning_and_rows_keep_their_numbers() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompts = tokenize("abcde", "ab", "abcdefg", USER, limit=5, overlong="drop")
    assert [(prompt.row, prompt.columns["answer"]) for prompt in prompts] == [(1, 1)]
    assert [str(warning.message) for warning in caught] == [
        "data.jsonl: 3 of 4 prompts have over 5 tokens (longest: 8) and are dropped"
    ]


def test_dropping_every_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match=r"1 of 1 prompts have over 1 tokens.*none is left"):
        tokenize("ab", limit=1, overlong="drop")
