"""The weighted sum of reward functions over a batch of completions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from app.rewards.load import CALL_ARGUMENTS, RewardError, RewardFunction, RewardSpec, load_reward
from app.types import Prompt

__all__ = ["RewardError", "RewardSpec", "RewardSum", "RewardTable"]

SHOWN_CHARACTERS = 120
"""Most characters of a completion in a message."""


@dataclass(frozen=True, kw_only=True)
class RewardTable:
    """Rewards of B completions."""

    total: tuple[float, ...]
    """[B] weighted sum of the functions that apply to the row. NaN: none applies, so the row has no reward; keep it
    out of the group's baseline and give it advantage 0, as TRL does (a 0 here would be a made-up reward)."""
    values: Mapping[str, tuple[float | None, ...]]
    """Function name -> [B] unweighted rewards. None: the function does not apply to the row."""


class RewardSum:
    """Scores completions by a weighted sum of reward functions, called as TRL calls them.

    Args:
        specs: at least one; names must differ.

    Raises:
        RewardError: if a function cannot be loaded (see `app.rewards.load.load_reward`) or two share a name.
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        names = [spec.label for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise RewardError(f"two rewards are named {name!r}; give each its own `name`")
        self.functions = [load_reward(spec) for spec in specs]
        self._warned_unscored = False

    @property
    def names(self) -> list[str]:
        """Name of each function, as in metrics."""
        return [function.spec.label for function in self.functions]

    @property
    def weights(self) -> list[float]:
        """Weight of each function in the sum."""
        return [function.spec.weight for function in self.functions]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise RewardError if a function needs an argument that is neither option nor column of the data."""
        for function in self.functions:
            missing = sorted(function.required - set(CALL_ARGUMENTS) - set(columns))
            if missing:
                raise RewardError(
                    f"reward {function.spec.label!r} needs {', '.join(missing)}: give a column of that name or an "
                    f"option; columns: {', '.join(sorted(columns)) or 'none'}"
                )

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> RewardTable:
        """Score B completions.

        Functions get keyword arguments only: prompts and completions (strings for text prompts, message lists for
        chats), completion_ids, and every column as a list of B values. One without **kwargs gets what it names.

        Args:
            prompts: [B] the prompt of each completion, so repeated within a group.
            completions: [B] decoded texts, special tokens left out.
            completion_ids: [B] the sampled ids.

        Raises:
            RewardError: naming function and source row, if a function raises or returns anything but B finite
                numbers or Nones.
            ValueError: if the three differ in length.
        """
        if not len(prompts) == len(completions) == len(completion_ids):
            raise ValueError(f"{len(prompts)} prompts, {len(completions)} completions, {len(completion_ids)} id lists")
        columns = dict.fromkeys(column for prompt in prompts for column in prompt.columns)
        self.check_columns(columns.keys())
        arguments: dict[str, list[Any]] = {
            **{column: [prompt.columns.get(column) for prompt in prompts] for column in columns},
            "prompts": [prompt.prompt for prompt in prompts],
            "completions": [_in_form_of(prompt, text) for prompt, text in zip(prompts, completions, strict=True)],
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        rows = [prompt.row for prompt in prompts]
        values = {function.spec.label: _values(function, arguments, rows, completions) for function in self.functions}
        total = tuple(
            self._total([values[function.spec.label][i] for function in self.functions], row)
            for i, row in enumerate(rows)
        )
        return RewardTable(total=total, values=values)

    def _total(self, row_values: Sequence[float | None], row: int) -> float:
        """Weighted sum over the functions that apply; NaN, with one warning per run, if none does."""
        terms = [
            function.spec.weight * value
            for function, value in zip(self.functions, row_values, strict=True)
            if value is not None
        ]
        if not terms and not self._warned_unscored:
            self._warned_unscored = True
            warnings.warn(f"row {row}: every reward function returned None, so it has no reward", stacklevel=3)
        return math.fsum(terms) if terms else math.nan


def _in_form_of(prompt: Prompt, text: str) -> str | list[dict[str, str]]:
    return text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]


def _values(
    function: RewardFunction, arguments: Mapping[str, list[Any]], rows: Sequence[int], completions: Sequence[str]
) -> tuple[float | None, ...]:
    """Call one function on the batch and check what it returns."""
    label = function.spec.label
    try:
        result = _call(function, arguments)
    except Exception as error:  # the user's function may raise anything
        raise _raised(function, arguments, rows, completions, error) from error
    if hasattr(result, "tolist"):  # arrays and tensors
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(
            f"reward {label!r} returned {type(result).__name__}; it must return a list of numbers or None"
        )
    if len(result) != len(rows):
        raise RewardError(f"reward {label!r} returned {len(result)} rewards for {len(rows)} completions")
    values: list[float | None] = []
    for row, text, value in zip(rows, completions, result, strict=True):
        value = value.item() if hasattr(value, "item") else value
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise RewardError(
                f"reward {label!r}: row {row} got {value!r}; it must be a finite number, or None where the function "
                f"does not apply; completion: {_shorten(text)}"
            )
        values.append(None if value is None else float(value))
    return tuple(values)


def _call(function: RewardFunction, arguments: Mapping[str, list[Any]]) -> Any:
    """Call with the arguments it takes. A bound option wins over a column of the same name."""
    return function.call(
        **{
            name: value
            for name, value in arguments.items()
            if name not in function.spec.options and (function.accepted is None or name in function.accepted)
        }
    )


def _raised(
    function: RewardFunction,
    arguments: Mapping[str, list[Any]],
    rows: Sequence[int],
    completions: Sequence[str],
    error: Exception,
) -> RewardError:
    """The error for a function that raised; it is called row by row to find the first row it raises on."""
    start = f"reward {function.spec.label!r} raised {type(error).__name__}: {' '.join(str(error).split())}"
    for index, row in enumerate(rows):
        try:
            _call(function, {name: values[index : index + 1] for name, values in arguments.items()})
        except Exception:
            return RewardError(f"{start}; row {row}, completion: {_shorten(completions[index])}")
    return RewardError(f"{start}; on a batch of rows {min(rows)} to {max(rows)}, on none of them alone")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")
