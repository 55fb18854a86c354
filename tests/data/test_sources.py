from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from jsonargparse import ArgumentParser

from app.data.readers import REASONING_GYM_STRIDE
from app.data.sources import DataError, PromptSource, load_rows


def write_jsonl(folder: Path, *rows: Any, name: str = "prompts.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def error_of(source: PromptSource) -> str:
    with pytest.raises(DataError) as caught:
        load_rows(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_jsonl_rows_in_order_with_every_column(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"prompt": "1+1=", "answer": 2}, "", {"prompt": "é ", "level": [3]})
    assert load_rows(PromptSource(path=path)) == [
        {"prompt": "1+1=", "answer": 2, "level": None},
        {"prompt": "é ", "answer": None, "level": [3]},
    ]


def test_jsonl_with_byte_order_mark_and_json_suffix(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [row["prompt"] for row in load_rows(PromptSource(path=str(path)))] == ["a", "b"]


def test_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "broken")
    assert [row["prompt"] for row in load_rows(PromptSource(path=path, limit=2))] == ["a", "b"]
    assert "limit is 0" in error_of(PromptSource(path=path, limit=0))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "broken JSON"),
        ("[1]", "a JSON list"),
        ({"question": "a"}, "no `prompt` column; columns: question"),
        ({"prompt": 3}, "the prompt is of type int"),
        ({"prompt": None}, "the prompt is null"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ["hi"]}, "message 0 is of type str"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "bot", "content": "a"}]}, "message 1 has role 'bot'"),
        ({"prompt": [{"content": "a"}]}, "message 0 has role None"),
        ({"prompt": [{"role": "user"}]}, "message 0 (user) has no content"),
        ({"prompt": [{"role": "user", "content": " "}]}, "message 0 (user) has no content"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "`content` that is of type list"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "the last message is the assistant's"),
        ({"prompt": "a", "completions": 1}, "column 'completions' has the name of a reward argument"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: Any, words: str) -> None:
    path = write_jsonl(tmp_path, {"prompt": "fine"}, "", line)
    message = error_of(PromptSource(path=path))
    assert message.startswith(f"{path} line 3: ")
    assert words in message


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert error_of(PromptSource(path=str(path))).startswith(f"{path} line 2: not UTF-8 text (byte 13)")


def test_missing_empty_and_unknown_files(tmp_path: Path) -> None:
    assert "no such file" in error_of(PromptSource(path=str(tmp_path / "none.jsonl")))
    assert "no such file" in error_of(PromptSource(path=str(tmp_path / "none.parquet")))
    assert "no rows" in error_of(PromptSource(path=write_jsonl(tmp_path, "", "")))
    assert "a .csv file" in error_of(PromptSource(path=write_jsonl(tmp_path, "prompt", name="prompts.csv")))


def test_repeated_id_names_both_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 7}, {"prompt": "b", "id": "7"}, {"prompt": "c"}, {"prompt": "d", "id": 7}]
    path = write_jsonl(tmp_path, *rows)
    assert error_of(PromptSource(path=path)).startswith(f"{path} line 4: id 7 is already used at {path} line 1")
    assert len(load_rows(PromptSource(path=path, limit=3))) == 3


def test_settings_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"prompt": "a"})
    assert "`name` is for Hugging Face" in error_of(PromptSource(path=path, name="main"))
    assert "`options` are for reasoning_gym" in error_of(PromptSource(path=path, options={"size": 3}))


def test_rename_makes_a_column_the_prompt(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"question": "1+1=", "solution": "2"})
    source = PromptSource(path=path, rename={"question": "prompt", "solution": "answer"})
    assert load_rows(source) == [{"prompt": "1+1=", "answer": "2"}]
    clash = write_jsonl(tmp_path, {"question": "a", "prompt": "b"})
    assert "two columns one name" in error_of(PromptSource(path=clash, rename={"question": "prompt"}))


def test_chat_and_system_prompt_make_messages(tmp_path: Path) -> None:
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "Be brief."}
    text, chat = write_jsonl(tmp_path, {"prompt": "a"}), write_jsonl(tmp_path, {"prompt": [user]}, name="chat.jsonl")
    assert load_rows(PromptSource(path=text, chat=True)) == [{"prompt": [user]}]
    for path in (text, chat):
        assert load_rows(PromptSource(path=path, system_prompt="Be brief.")) == [{"prompt": [system, user]}]
    assert load_rows(PromptSource(path=chat, chat=True)) == [{"prompt": [user]}]
    own = write_jsonl(tmp_path, {"prompt": [system, user]}, name="own.jsonl")
    assert "a system message of its own" in error_of(PromptSource(path=own, system_prompt="Be long."))


def test_parquet_text_and_chat(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "name": "Bo"}]]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": chats, "answer": [1, None]}), path)
    # Arrow gives every struct every field: the first message reads back with name=None, which is left out again.
    assert load_rows(PromptSource(path=str(path))) == [
        {"prompt": chats[0], "answer": 1},
        {"prompt": chats[1], "answer": None},
    ]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), path)
    assert error_of(PromptSource(path=str(path))).startswith(f"{path} row 1: the prompt is null")
    path.write_bytes(b"not parquet")
    assert "cannot be read as Parquet" in error_of(PromptSource(path=str(path)))


CHAIN_SUM = "reasoning_gym/chain_sum"


def test_reasoning_gym_rows_are_seeded_and_scorable() -> None:
    source = PromptSource(path=CHAIN_SUM, limit=4, options={"min_digits": 6, "max_digits": 6, "max_terms": 2})
    rows = load_rows(source)
    assert rows == load_rows(source)
    assert [set(row) for row in rows] == [{"prompt", "answer", "reasoning_gym_entry"}] * 4
    for row in rows:  # the task's text ends in "... <sum> =": the answer can be checked by doing the sum
        assert int(row["answer"]) == eval(row["prompt"].partition(":")[2].rstrip(" ="))
        assert row["reasoning_gym_entry"]["task"] == "chain_sum"


def test_reasoning_gym_splits_and_seeds_share_no_row() -> None:
    def prompts(split: str, seed: int) -> set[str]:
        options = {"size": 20, "seed": seed, "min_digits": 8, "max_digits": 8}
        return {row["prompt"] for row in load_rows(PromptSource(path=CHAIN_SUM, split=split, options=options))}

    # With neighbouring seeds handed to the library as they are, 19 of 20 rows would be shared.
    drawn = [prompts(split, seed) for seed in (0, 1) for split in ("train", "validation", "test")]
    assert len(set.union(*drawn)) == 6 * 20


def test_reasoning_gym_size_and_limit() -> None:
    assert len(load_rows(PromptSource(path=CHAIN_SUM, options={"size": 5}))) == 5
    assert len(load_rows(PromptSource(path=CHAIN_SUM, limit=3, options={"size": 5}))) == 3
    assert len(load_rows(PromptSource(path=CHAIN_SUM, limit=7))) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "reasoning_gym/chain_sums"}, "no such task in reasoning-gym; closest names: chain_sum"),
        ({"split": "dev"}, "split 'dev' is unknown; it is one of train, validation, test"),
        ({"options": {"digits": 3}}, "options refused by the task: TypeError"),
        ({"options": {"min_terms": 9, "max_terms": 3}}, "options refused by the task: AssertionError"),
        ({"options": {"seed": "one"}}, "options.seed is 'one'"),
        ({"options": {"size": REASONING_GYM_STRIDE + 1}}, f"at most {REASONING_GYM_STRIDE}"),
    ],
)
def test_reasoning_gym_bad_settings(change: dict[str, Any], words: str) -> None:
    assert words in error_of(PromptSource(**{"path": CHAIN_SUM, **change}))


def test_addition_is_asked_for_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("app.builtin.addition")
    module.rows = lambda split: [{"prompt": f"{split} {i}", "answer": i} for i in range(3)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "app.builtin.addition", module)
    rows = load_rows(PromptSource(path="lockstep/addition", split="validation", limit=2))
    assert rows == [{"prompt": "validation 0", "answer": 0}, {"prompt": "validation 1", "answer": 1}]


def test_folder_is_read_as_a_hugging_face_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder, {"prompt": "a", "id": 0}, {"prompt": "b", "id": 1}, name="train.jsonl")
    write_jsonl(folder, {"prompt": "c", "id": 0}, name="validation.jsonl")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert [row["prompt"] for row in load_rows(PromptSource(path=str(folder)))] == ["a", "b"]
    assert [row["prompt"] for row in load_rows(PromptSource(path=str(folder), split="validation"))] == ["c"]
    message = error_of(PromptSource(path=str(folder), split="dev"))
    assert message.startswith(f"{folder}: the folder does not load as a dataset: ValueError")
    assert "dev" in message


def test_hub_dataset_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = error_of(PromptSource(path="openai/gsm8k", name="main"))
    assert message.startswith("openai/gsm8k: no such folder here")
    assert "Couldn't reach 'openai/gsm8k' on the Hub" in message


def test_yaml_reads_a_source() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--train", type=PromptSource)
    parsed = parser.parse_args(["--train", '{"path": "a.jsonl", "limit": 3, "options": {"size": 4}}'])
    source = parser.instantiate_classes(parsed).train
    assert source == PromptSource(path="a.jsonl", limit=3, options={"size": 4})


def test_a_line_that_ends_too_early_is_marked_at_its_own_end(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text('{"prompt": "1+1="}\n{"prompt": "2+2="\n')
    with pytest.raises(DataError, match=r"cut.jsonl line 2: broken JSON \(.*, column 18\)"):
        load_rows(PromptSource(path=str(path)))
