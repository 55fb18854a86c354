from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from jsonargparse import ArgumentParser

from app.rewards.load import BUILTINS
from app.rewards.weighted_sum import RewardError, RewardSpec, RewardSum, RewardTable
from app.types import Prompt

CHAT = [{"role": "user", "content": "2+2="}]


def prompt(row: int, text: Any = "2+2=", **columns: Any) -> Prompt:
    return Prompt(row=row, prompt=text, token_ids=(1,), columns=columns)


def seen(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    RECEIVED.clear()
    RECEIVED.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
    return [0.0] * len(prompts)


RECEIVED: dict[str, Any] = {}


def named_only(answer: list[Any], bonus: float = 0.0) -> list[float]:
    return [float(value) + bonus for value in answer]


def odd_only(answer: list[int], **_: Any) -> list[float | None]:
    return [float(value) if value % 2 else None for value in answer]


def raises_on_three(answer: list[int]) -> list[float]:
    return [1.0 / (value - 3) for value in answer]


def raises_on_two_rows(answer: list[int]) -> list[float]:
    if len(answer) > 1:
        raise RuntimeError("too\nmany")
    return [1.0]


def returns(result: list[Any], **_: Any) -> Any:
    return result[0]


async def asynchronous(**_: Any) -> list[float]:
    return []


NOT_A_FUNCTION = 3


def spec(function: str, weight: float = 1.0, name: str | None = None, **options: Any) -> RewardSpec:
    path = function if function in BUILTINS or "." in function or ":" in function else f"{__name__}:{function}"
    return RewardSpec(function=path, weight=weight, name=name, options=options)


def score(prompts: list[Prompt], *specs: RewardSpec, texts: list[str] | None = None) -> RewardTable:
    texts = texts or ["4"] * len(prompts)
    return RewardSum(specs).score(prompts, texts, [[7]] * len(prompts))


def test_functions_are_called_as_trl_calls_them() -> None:
    rows = [prompt(0, answer=4), prompt(0, answer=4), prompt(5, CHAT, answer=9, level="hard")]
    RewardSum([spec("seen")]).score(rows, ["4", "5", "6"], [[1, 2], (3,), []])
    assert RECEIVED == {
        "prompts": ["2+2=", "2+2=", CHAT],
        "completions": ["4", "5", [{"role": "assistant", "content": "6"}]],
        "completion_ids": [[1, 2], [3], []],
        "answer": [4, 4, 9],
        "level": [None, None, "hard"],
    }


def test_a_function_without_kwargs_gets_only_what_it_names() -> None:
    table = score([prompt(0, answer=4, level="hard", id=3)], spec("named_only", bonus=0.5))
    assert table.total == (4.5,)


def test_an_option_wins_over_a_column_of_its_name() -> None:
    assert score([prompt(0, answer=4, bonus=100)], spec("named_only", bonus=0.5)).total == (4.5,)
    columns = {"answer": "4", "pattern": "x"}
    assert score([prompt(0, **columns)], spec("exact_match", pattern="(4)")).total == (1.0,)


def test_total_is_the_weighted_sum_over_the_functions_that_apply() -> None:
    prompts = [prompt(0, answer=2), prompt(1, answer=3)]
    table = score(prompts, spec("named_only", 0.5), spec("odd_only", 2.0), spec("named_only", 0.0, name="logged"))
    assert table.values == {"named_only": (2.0, 3.0), "odd_only": (None, 3.0), "logged": (2.0, 3.0)}
    assert table.total == (0.5 * 2, 0.5 * 3 + 2.0 * 3)


def test_a_row_to_which_nothing_applies_is_nan_with_one_warning() -> None:
    rewards = RewardSum([spec("odd_only")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            table = rewards.score([prompt(6, answer=2), prompt(7, answer=3)], ["a", "b"], [[1], [1]])
            assert math.isnan(table.total[0])
            assert table.total[1] == 3.0
    assert [str(warning.message) for warning in caught] == [
        "row 6: every reward function returned None, so it has no reward"
    ]


@pytest.mark.parametrize(
    "result",
    [[1, 0], (True, False), numpy.array([1.0, 0.0]), torch.tensor([1.0, 0.0]), [torch.tensor(1.0), numpy.int64(0)]],
)
def test_numbers_of_any_kind_are_taken(result: Any) -> None:
    assert score([prompt(0, result=result), prompt(1, result=result)], spec("returns")).total == (1.0, 0.0)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned NoneType; it must return a list"),
        (1.0, "returned float; it must return a list"),
        ([1.0], "returned 1 rewards for 2 completions"),
        ([0.0, math.nan], "row 12 got nan"),
        ([0.0, math.inf], "row 12 got inf"),
        ([0.0, "1"], "row 12 got '1'"),
        ([0.0, [1.0]], "row 12 got [1.0]"),
        ([0.0, 1j], "row 12 got 1j"),
    ],
)
def test_an_unusable_result_names_function_row_and_completion(result: Any, words: str) -> None:
    prompts = [prompt(11, result=result), prompt(12, result=result)]
    with pytest.raises(RewardError) as caught:
        score(prompts, spec("returns", name="mine"), texts=["a", "b" * 500])
    assert f"reward 'mine'{' ' if words.startswith('returned') else ': '}{words}" in str(caught.value)
    if "row" in words:
        assert str(caught.value).endswith(f"completion: '{'b' * 120}...'")


def test_a_function_that_raises_names_the_row_it_raises_on() -> None:
    prompts = [prompt(20, answer=1), prompt(21, answer=3), prompt(22, answer=5)]
    with pytest.raises(RewardError) as caught:
        score(prompts, spec("raises_on_three"), texts=["a", "b\n", "c"])
    assert str(caught.value) == (
        "reward 'raises_on_three' raised ZeroDivisionError: float division by zero; row 21, completion: 'b\\n'"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_that_raises_on_no_single_row() -> None:
    with pytest.raises(
        RewardError, match=r"RuntimeError: too many; on a batch of rows 20 to 21, on none of them alone"
    ):
        score([prompt(20, answer=1), prompt(21, answer=3)], spec("raises_on_two_rows"))


def test_a_missing_column_is_named_before_the_first_rollout() -> None:
    rewards = RewardSum([spec("exact_match")])
    rewards.check_columns(["answer", "id"])
    with pytest.raises(
        RewardError, match=r"reward 'exact_match' needs answer: give a column .*; columns: id, solution"
    ):
        rewards.check_columns(["solution", "id"])
    with pytest.raises(RewardError, match="needs answer"):
        score([prompt(0, solution=4)], spec("exact_match"))
    with pytest.raises(RewardError, match="reward 'length' needs buffer_tokens, max_tokens"):
        RewardSum([spec("length")]).check_columns(["answer"])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (spec("exact.match"), "module exact does not import: ModuleNotFoundError"),
        (
            RewardSpec(function="exact_mach"),
            "reward 'exact_mach' is unknown; built in: exact_match, format_regex, length",
        ),
        (spec("nothing_here"), "has no 'nothing_here'"),
        (spec("NOT_A_FUNCTION"), "has no callable 'NOT_A_FUNCTION'"),
        (spec("asynchronous"), "is async"),
        (spec("exact_match", patern="x"), "no option 'patern'; it takes answer, pattern"),
        (spec("named_only", bonis=1.0), "no option 'bonis'; it takes answer, bonus"),
        (spec("seen", completions=[]), "no option 'completions'; it takes none"),
        (spec("seen", math.nan), "weight is nan"),
    ],
)
def test_a_bad_spec_is_refused_when_loaded(bad: RewardSpec, words: str) -> None:
    with pytest.raises(RewardError) as caught:
        RewardSum([bad])
    assert words in str(caught.value)


def test_two_of_one_name_and_unequal_lengths() -> None:
    with pytest.raises(RewardError, match="two rewards are named 'seen'"):
        RewardSum([spec("seen"), spec("seen", 0.5)])
    with pytest.raises(ValueError, match="2 prompts, 1 completions, 2 id lists"):
        RewardSum([spec("seen")]).score([prompt(0), prompt(1)], ["a"], [[1], [2]])


def test_own_functions_are_found_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_rewards.py").write_text("def two(completions, **_):\n    return [2.0] * len(completions)\n")
    (tmp_path / "my_broken_rewards.py").write_text("raise KeyError('at import')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert score([prompt(0)], spec("my_own_rewards.two"), spec("my_own_rewards:two", name="again")).total == (4.0,)
    with pytest.raises(RewardError, match="module my_broken_rewards does not import: KeyError: 'at import'"):
        RewardSum([spec("my_broken_rewards.two")])


def test_every_built_in_loads_under_its_name() -> None:
    for name in BUILTINS:
        (function,) = RewardSum([spec(name)]).functions
        assert function.spec.label == name
        assert function.accepted is None  # takes any column, as TRL hands over all of them


def test_yaml_reads_a_list_of_specs() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=list[RewardSpec])
    text = '[{"function": "length", "weight": 0.2, "options": {"max_tokens": 9, "buffer_tokens": 3}}]'
    rewards = parser.instantiate_classes(parser.parse_args(["--rewards", text])).rewards
    assert rewards == [spec("length", 0.2, max_tokens=9, buffer_tokens=3)]
    table = RewardSum(rewards).score([prompt(0)], ["x"], [[1] * 8])
    assert table.total == pytest.approx((0.2 * -2 / 3,))
