from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.audit.attribution.checks import (
    all_checks,
    chat_template,
    eos_sources,
    prompt_ids,
    scored_tokens,
    special_tokens,
    stopping,
    token_range,
    vocabularies,
)
from app.audit.types import AuditRow, Check
from app.data.collate import collate, row_to_score
from app.data.prompts import tokenize_prompts
from app.data.tokenizer import load_tokenizer
from app.types import Prompt, TrainBatch
from tests.data.character_tokenizer import VOCABULARY, character_tokenizer, ids

BOS, EOS, PAD = (VOCABULARY[token] for token in ("<s>", "</s>", "<pad>"))
CHAT = [{"role": "user", "content": "hi"}]
TOKENIZER = character_tokenizer()


def prompt(text: Any, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(row=3, prompt=text, token_ids=token_ids, columns={})


def row(prompt: tuple[int, ...], completion: tuple[int, ...], reason: Any = "stop") -> AuditRow:
    return AuditRow(prompt_ids=prompt, completion_ids=completion, finish_reason=reason)


def batch(rows: list[AuditRow]) -> TrainBatch:
    return collate(
        [row_to_score(row.prompt_ids, row.completion_ids) for row in rows],
        pad_token_id=PAD,
    )


ROWS = [row(ids("1+1="), (*ids("2", bos=False), EOS)), row(ids("12+3="), ids("15 a", bos=False), "length")]


def passed(check: Check, *words: str) -> None:
    assert check.passed is True, check.detail
    assert_says(check, *words)


def failed(check: Check, *words: str) -> None:
    assert check.passed is False, check.detail
    assert_says(check, *words)


def unknown(check: Check, *words: str) -> None:
    assert check.passed is None, check.detail
    assert_says(check, *words)


def assert_says(check: Check, *words: str) -> None:
    assert "\n" not in check.detail
    for word in words:
        assert word in check.detail


def test_prompts_that_were_consumed_as_sent() -> None:
    sent = [ids("ab"), ids("c")]
    passed(prompt_ids(sent, [list(ids("ab")), None], TOKENIZER), "all 1 rows")
    unknown(prompt_ids(sent, [None, None], TOKENIZER), "does not report")


def test_the_first_difference_of_a_prompt_is_shown_with_its_text() -> None:
    sent = [ids("ab"), ids("abc\nd"), ids("e")]
    consumed = [ids("ab"), ids("abcxd"), (BOS, *ids("e"))]
    wanted = "2 of 3 rows differ; row 1: sent 6 tokens, consumed 6, first at token 4 after '<s> a b c': sent"
    newline, x = VOCABULARY["\n"], VOCABULARY["x"]
    found = prompt_ids(sent, consumed, TOKENIZER)
    failed(found, f"{wanted} {newline} '\\n', consumed {x} 'x'")
    failed(prompt_ids([ids("ab")], [ids("abc")], TOKENIZER), "first at token 3", "sent its end", "'c'")


def test_chats_and_texts_as_the_data_module_tokenises_them() -> None:
    chats = tokenize_prompts([{"prompt": CHAT}], TOKENIZER, 100, "data")
    passed(chat_template(chats, TOKENIZER), "1 prompts: chats")
    marked = tokenize_prompts([{"prompt": CHAT}], TOKENIZER, 100, "data", chat_template_kwargs={"mark": "m"})
    passed(chat_template(marked, TOKENIZER, {"mark": "m"}))
    failed(chat_template(marked, TOKENIZER), "sent", "'m'", "tokenizer", "'a'")
    plain = character_tokenizer(None)
    texts = tokenize_prompts([{"prompt": "<s>ab"}, {"prompt": "c"}], plain, 100, "data")
    passed(chat_template(texts, plain), "2 prompts: text")


def test_text_prompts_of_a_chat_model_are_noted() -> None:
    unknown(
        chat_template([prompt("ab", ids("ab"))], TOKENIZER), "1 of 1 prompts are text", "chat model expects messages"
    )


def test_template_without_a_generation_prompt_of_its_own_lacks_none() -> None:
    tokenizer = load_tokenizer("lockstep/addition-1m")
    chat = [{"role": "user", "content": "1+2="}]
    found = tokenize_prompts([{"prompt": chat}], tokenizer, 100, "data")
    assert found[0].token_ids == (1, 5, 14, 6, 15)
    passed(chat_template(found, tokenizer))


@pytest.mark.parametrize(
    ("text", "sent", "words"),
    [
        (CHAT, (BOS, *ids("u:hi;a:")), "two beginning-of-sequence tokens '<s>'"),
        ("ab", (BOS, *ids("ab")), "two beginning-of-sequence tokens '<s>'"),
        (CHAT, ids("u:hi;"), "lacks the generation prompt 'a :'"),
        (CHAT, ids("u:hi;a:", bos=False), "lacks the beginning-of-sequence token '<s>'"),
        (CHAT, ids("u:ho;a:"), "first at token 4 after '<s> u : h'"),
        ("abc", ids("ab"), "first at token 3"),
    ],
)
def test_template_faults(text: Any, sent: tuple[int, ...], words: str) -> None:
    failed(chat_template([prompt(text, sent)], TOKENIZER), "prompt 3: ", words)


def test_chat_without_a_template() -> None:
    failed(chat_template([prompt(CHAT, ids("hi"))], character_tokenizer(None)), "no chat template")


def test_special_tokens_of_prompts_are_counted_and_a_pad_is_a_fault() -> None:
    passed(special_tokens([ids("ab"), ids("c")], TOKENIZER), f"of 2 prompts: {BOS} '<s>' in 2")
    passed(special_tokens([ids("ab", bos=False)], TOKENIZER), "none in the prompts")
    failed(special_tokens([ids("ab"), (PAD, PAD, *ids("c"))], TOKENIZER), "row 1", "'<pad>'", "position 0 of 4")


def test_a_pad_that_is_the_end_of_sequence_may_stand_in_a_prompt() -> None:
    tokenizer = character_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    passed(special_tokens([(*ids("ab"), EOS, *ids("c"))], tokenizer), "'</s>' in 1")


def test_ids_outside_of_embedding_or_tokenizer() -> None:
    size = len(VOCABULARY)
    passed(token_range(ROWS, TOKENIZER, size), f"{size} embeddings")
    failed(token_range(ROWS, TOKENIZER, VOCABULARY["1"]), "row 0", "in the prompt is outside")
    wide = [*ROWS, row(ids("a"), (size + 1, EOS))]
    failed(token_range(wide, TOKENIZER, size), f"row 2: id {size + 1} in the completion is outside")
    failed(token_range([row((-1,), (EOS,))], TOKENIZER, size), "id -1")
    passed(token_range(wide, TOKENIZER, size + 8), "1 sampled tokens have no text")
    failed(token_range([row((size + 1,), (EOS,))], TOKENIZER, size + 8), "another tokenizer")


def test_vocabularies() -> None:
    passed(vocabularies(128, 128, TOKENIZER), "128 logits", f"tokenizer {len(VOCABULARY)} tokens")
    failed(vocabularies(128, 104, TOKENIZER), "104", "128")
    unknown(vocabularies(128, None, TOKENIZER), "does not tell")


def test_eos_sources() -> None:
    passed(eos_sources({"config": EOS, "tokenizer": [EOS], "generation config": None}, TOKENIZER), f"{EOS} '</s>', in")
    found = eos_sources({"config": EOS, "generation config": [EOS, PAD]}, TOKENIZER)
    unknown(found, f"config: {EOS} '</s>'; generation config: {PAD} '<pad>', {EOS} '</s>'", "stops at each of them")
    failed(eos_sources({"config": None, "tokenizer": []}, TOKENIZER), "none in config, tokenizer")
    passed(eos_sources({"config": 0}, TOKENIZER), "0 '<pad>'")  # an id of 0 is an id


def test_completions_that_stop_where_they_should() -> None:
    passed(stopping(ROWS, [EOS], TOKENIZER), "1 rows end in an end of sequence, 1 are cut")


@pytest.mark.parametrize(
    ("completion", "reason", "words"),
    [
        (ids("12", bos=False), "stop", "stopped without an end of sequence in 1 of 3 rows (row 2 ends in '2'"),
        ((EOS, *ids("1", bos=False)), "length", "inside in 1 of 3 rows (row 2 goes on after '</s>' at token 0"),
        ((EOS, EOS), "stop", "inside in 1 of 3 rows"),
        ((*ids("1", bos=False), EOS), "length", "cut by length at an end of sequence in 1 of 3 rows"),
    ],
)
def test_stopping_faults(completion: tuple[int, ...], reason: str, words: str) -> None:
    failed(stopping([*ROWS, row(ids("1"), completion, reason)], [EOS], TOKENIZER), words)


def test_every_end_of_sequence_counts() -> None:
    rows = [row(ids("1"), (PAD,))]
    passed(stopping(rows, [EOS, PAD], TOKENIZER))
    failed(stopping(rows, [EOS], TOKENIZER))


def test_a_batch_as_collated_scores_each_sampled_token() -> None:
    passed(scored_tokens(ROWS, batch(ROWS)), "6 tokens")


def changed(**fields: Any) -> TrainBatch:
    return dataclasses.replace(batch(ROWS), **fields)


def edited(name: str, place: tuple[int, int], value: Any) -> TrainBatch:
    tensor = getattr(batch(ROWS), name).clone()
    tensor[place] = value
    return changed(**{name: tensor})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (batch(ROWS[:1]), "2 rows were sampled, 1 are scored"),
        (changed(lengths=(8, 10)), "row 0: prompt and completion have 5 + 2 tokens, the batch counts 6 + 2"),
        (edited("mask", (0, 1), False), "row 0: 2 tokens were sampled, 1 are scored"),
        (edited("mask", (0, 2), True), "row 0: 2 tokens were sampled, 3 are scored"),
        (changed(mask=batch(ROWS).mask.flip(1)), "row 0: the mask has a hole at token 0"),
        (edited("positions", (1, 0), 4), "row 1: the batch scores other columns than those of the sampled tokens"),
        (edited("input_ids", (1, 2), PAD), "row 1: the ids in the batch are not the row's"),
        (changed(input_ids=batch(ROWS).input_ids.roll(1, 1)), "row 0: the ids in the batch"),
    ],
)
def test_batches_that_do_not_hold_the_rows(wrong: TrainBatch, words: str) -> None:
    failed(scored_tokens(ROWS, wrong), words)


def test_all_checks_of_a_sound_pipeline() -> None:
    prompts = tokenize_prompts([{"prompt": CHAT}], TOKENIZER, 100, "data")
    rows = [row(prompts[0].token_ids, (*ids("yes", bos=False), EOS))]
    found = all_checks(
        rows=rows,
        prompts=prompts,
        consumed=[list(prompts[0].token_ids)],
        batch=batch(rows),
        tokenizer=TOKENIZER,
        eos_ids=[EOS],
        eos_by_source={"config": EOS},
        trainer_vocabulary=128,
        engine_vocabulary=128,
    )
    assert [check.passed for check in found] == [True] * 8
    assert len({check.name for check in found}) == 8
