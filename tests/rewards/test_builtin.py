from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from app.data.sources import PromptSource, load_rows
from app.rewards.builtin import exact_match, format_regex, length
from app.rewards.math_answers import math_verify
from app.rewards.reasoning_tasks import reasoning_gym


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_exact_match_strips_both_sides_and_compares_as_text() -> None:
    completions = [" 4\n", chat("4"), "4.0", "44", "4"]
    assert exact_match(completions, answer=[4, " 4 ", 4, "4", None]) == [1.0, 1.0, 0.0, 0.0, None]


def test_exact_match_takes_the_last_match_of_the_pattern() -> None:
    completions = ["#### 3 no, #### 4", "#### 4 no, #### 3", "4", "####\n4"]
    assert exact_match(completions, answer=["4"] * 4, pattern=r"####\s*(\S+)") == [1.0, 0.0, 0.0, 1.0]
    assert exact_match(["is 12", "is 12 or 13"], answer=["12"] * 2, pattern=r"\d+") == [1.0, 0.0]


def test_format_regex_whole_or_part() -> None:
    pattern = "<think>.*</think>"
    completions = ["<think>a\nb</think>", chat("<think></think>"), "<think>a</think> 4", "none"]
    assert format_regex(completions, pattern) == [1.0, 1.0, 0.0, 0.0]
    assert format_regex(completions, pattern, mode="search") == [1.0, 1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="mode is 'match'; it is fullmatch or search"):
        format_regex(completions, pattern, mode="match")  # type: ignore[arg-type]


def test_length_follows_dapo_equation_13() -> None:
    # By hand with max 100 and buffer 20: free up to 80, slope 1/20, -1 from 100 on. TRL's own example: 90 -> -0.5.
    expected = {0: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1.0, 101: -1.0, 500: -1.0}
    ids = [[1] * tokens for tokens in expected]
    assert length(ids, max_tokens=100, buffer_tokens=20) == pytest.approx(list(expected.values()), abs=1e-12)


@pytest.mark.parametrize("buffer", [0, 101])
def test_length_refuses_a_buffer_outside_its_range(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer_tokens is"):
        length([[1]], max_tokens=100, buffer_tokens=buffer)


MATH_CASES: list[tuple[Any, str, float | None]] = [
    # TRL's documented example of accuracy_reward: 1.0, then 0.0.
    (r"\frac{1}{3}", r"My answer is \boxed{\frac{1}{3}}", 1.0),
    (r"\frac{1}{3}", r"My answer is \boxed{\frac{1}{2}}", 0.0),
    (72, "The answer is 72", 1.0),
    ("72", "72.0", 1.0),
    ("1,234", "1234", 1.0),
    ("0.5", r"$\frac12$", 1.0),
    ("72", r"\boxed{72} and not 71", 1.0),
    (r"\sqrt{2}", r"$2^{1/2}$", 1.0),
    ("x+1", "$1+x$", 1.0),
    ("Natalia sold 24.\n#### 72", "72", 1.0),
    ("72", "no number", 0.0),
    ("72", "", 0.0),
    ("yes", "yes", None),
    ("", "72", None),
    (None, "72", None),
]


def math_rewards() -> list[float | None]:
    return math_verify([case[1] for case in MATH_CASES], answer=[case[0] for case in MATH_CASES])


def test_math_verify_compares_values() -> None:
    assert math_rewards() == [case[2] for case in MATH_CASES]
    assert math_verify([chat(r"\boxed{4}")], answer=["4"]) == [1.0]


def test_math_verify_gives_up_on_an_endless_computation() -> None:
    with pytest.raises(ValueError, match="timeout_seconds is 0"):
        math_verify(["1"], answer=["1"], timeout_seconds=0)
    assert math_rewards()  # what is loaded at the first use does not count
    assert math_verify(["$9^{9^{9^9}}$", "$2$"], answer=["2", "2"], timeout_seconds=3) == [0.0, 1.0]


def test_math_verify_works_and_gives_up_outside_the_main_thread() -> None:
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(math_rewards())
            results.append(math_verify(["$9^{9^{9^9}}$"], answer=["2"], timeout_seconds=3))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=600)
    assert results == [[case[2] for case in MATH_CASES], [0.0]]


def entries(task: str, count: int = 2, **options: Any) -> list[dict[str, Any]]:
    return load_rows(PromptSource(path=f"reasoning_gym/{task}", limit=count, options=options))


def test_reasoning_gym_uses_the_last_answer_tag() -> None:
    row = entries("chain_sum", 1, min_digits=4, max_digits=4)[0]
    right, wrong = row["answer"], str(int(row["answer"]) + 1)
    completions: list[Any] = [
        f"so <answer> {right} </answer>",
        chat(f"<answer>{wrong}</answer> no, <answer>{right}</answer>"),
        f"<answer>{wrong}</answer>",
        right,
        right,
    ]
    columns = [row["reasoning_gym_entry"]] * 4 + [None]
    assert reasoning_gym(completions, columns) == [1.0, 1.0, 0.0, 0.0, None]
    # The task's partial score: text that holds the answer gets len(answer) / len(text).
    padded = f"{right} or so"
    expected = [1.0, len(right) / len(padded)]
    assert reasoning_gym([f" {right}\n", padded], columns[:2], tag=None) == pytest.approx(expected)


def test_reasoning_gym_scores_with_the_options_of_the_rows() -> None:
    # decimal_arithmetic tolerates one unit of the last place asked for: 0.1 here, far less by default.
    row = entries("decimal_arithmetic", 1, min_num_decimal_places=1, max_num_decimal_places=1)[0]
    near = str(float(row["answer"]) + 0.05)
    assert reasoning_gym([near], [row["reasoning_gym_entry"]], tag=None) == [1.0]
    default = {**row["reasoning_gym_entry"], "options": {}}
    assert reasoning_gym([near], [default], tag=None) == [0.0]


def test_reasoning_gym_counts_a_scorer_that_raises_as_wrong_with_a_warning() -> None:
    row = entries("prime_factorization", 1)[0]
    columns = [row["reasoning_gym_entry"]] * 2
    with pytest.warns(UserWarning, match="reasoning_gym/prime_factorization: its scorer raises ValueError; scored 0"):
        assert reasoning_gym(["no idea", row["answer"]], columns, tag=None) == [0.0, 1.0]


def test_reasoning_gym_right_answers_score_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for task in ("countdown", "gcd", "number_sorting", "spell_backward"):
            for row in entries(task):
                completion = f"<answer>{row['answer']}</answer>"
                assert reasoning_gym([completion], [row["reasoning_gym_entry"]]) == [1.0], task
