"""Reward specifications: a name or import path in the configuration becomes a function."""

import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.errors import LockstepError

BUILTINS = {
    "exact_match": "app.rewards.builtin.exact_match",
    "format_regex": "app.rewards.builtin.format_regex",
    "length": "app.rewards.builtin.length",
    "math_verify": "app.rewards.math_answers.math_verify",
    "reasoning_gym": "app.rewards.reasoning_tasks.reasoning_gym",
}
CALL_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What every reward function is offered beside the columns of the data."""


class RewardError(LockstepError, ValueError):
    """A reward function cannot be loaded, or gave no usable reward. One line: which function, which row, why."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One reward function and its weight in the sum."""

    function: str
    """exact_match, math_verify, format_regex, length, reasoning_gym, or an import path: module.function or
    module:function (modules in the working folder are found)."""
    weight: float = 1.0
    """Factor in the sum. 0: computed and logged, not trained on."""
    name: str | None = None
    """Name in metrics and messages. None: the function's name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function."""

    @property
    def label(self) -> str:
        """`name`, or the last part of `function`."""
        return self.name or self.function.replace(":", ".").rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A loaded reward function, and what it takes."""

    spec: RewardSpec
    """Where it came from."""
    call: Callable[..., Any]
    """The function with its options bound."""
    accepted: frozenset[str] | None
    """Keyword arguments it takes; None: any (it has **kwargs)."""
    required: frozenset[str]
    """Keyword arguments without a default that the options do not give."""


def load_reward(spec: RewardSpec) -> RewardFunction:
    """Find the function, check its options and bind them.

    Raises:
        RewardError: for an unknown function, a path that does not import, something that is not a plain function,
            an option it does not take, or a weight that is not finite.
    """
    if not math.isfinite(spec.weight):
        raise RewardError(f"reward {spec.label!r}: weight is {spec.weight}; it is a finite number")
    function = _find(spec)
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward {spec.label!r}: {spec.function} is async; write it as a plain function")
    parameters = inspect.signature(function).parameters
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    # A built-in ignores columns through **kwargs, so a misspelt option would be ignored too.
    for option in spec.options:
        known = option in named and option not in CALL_ARGUMENTS
        if not known and (not takes_any or spec.function in BUILTINS or option in CALL_ARGUMENTS):
            takes = ", ".join(name for name in named if name not in CALL_ARGUMENTS) or "none"
            raise RewardError(f"reward {spec.label!r}: no option {option!r}; it takes {takes}")
    required = {name for name, parameter in named.items() if parameter.default is inspect.Parameter.empty}
    return RewardFunction(
        spec=spec,
        call=functools.partial(function, **spec.options),
        accepted=None if takes_any else frozenset(named) - frozenset(spec.options),
        required=frozenset(required - set(spec.options)),
    )


def _find(spec: RewardSpec) -> Callable[..., Any]:
    """Import the function a spec names."""
    path = BUILTINS.get(spec.function, spec.function)
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise RewardError(
            f"reward {spec.function!r} is unknown; built in: {', '.join(sorted(BUILTINS))}; "
            "one of your own: module.function"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a console script starts without the working folder on the path
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything while it loads
        raise RewardError(
            f"reward {spec.function!r}: module {module_name} does not import: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "has no" if function is None else "has no callable"
        raise RewardError(f"reward {spec.function!r}: {module.__file__ or module_name} {what} {attribute!r}")
    return function
