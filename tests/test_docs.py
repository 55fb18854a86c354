"""The documentation says what the code does. `python -m tests.test_docs` writes its generated tables anew."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest

from app.dashboard.keys import KEYS
from app.maths.correction import PRESETS, CorrectionConfig
from app.maths.objective import LOSS_FORMS, LossConfig
from app.maths.objective.config import LossType
from app.metrics import table

PAGE = Path(__file__).parent.parent / "app" / "README.md"


def presets() -> str:
    """Preset -> every field that differs from no correction."""
    nothing = CorrectionConfig()
    lines = ["| preset | settings |", "| --- | --- |"]
    for name, config in PRESETS.items():
        said = []
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.name == "rejection":
                said += [
                    f"rejection: {rule.level} {rule.statistic} {_bounds(rule.lower, rule.upper)}" for rule in value
                ]
            elif value != getattr(nothing, field.name) or (field.name == "control" and config.level != "none"):
                said.append(f"{field.name}: {str(value).lower() if isinstance(value, bool) else _number(value)}")
        lines.append(f"| `{name}` | {', '.join(said)} |")
    return "\n".join(lines)


def _bounds(lower: float | None, upper: float | None) -> str:
    return f"≤ {_number(upper)}" if lower is None else f"[{_number(lower)}, {_number(upper)}]"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


BLOCKS = {"presets": presets, "metrics": table.markdown, "keys": lambda: table.markdown(KEYS)}


def block(page: str, name: str) -> re.Match[str]:
    """The generated part of the page of this name."""
    found = re.search(rf"(?<=<!-- begin: {name} -->\n).*?(?=<!-- end: {name} -->)", page, flags=re.DOTALL)
    assert found, f"{PAGE} has no block {name}"
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_tables_are_those_of_the_code(name: str) -> None:
    assert block(PAGE.read_text(), name).group() == BLOCKS[name]() + "\n", "run python -m tests.test_docs"


@pytest.mark.parametrize(
    "name",
    [
        *(field.name for kind in (CorrectionConfig, LossConfig) for field in dataclasses.fields(kind)),
        *get_args(LossType),
    ],
)
def test_every_setting_is_explained(name: str) -> None:
    page = PAGE.read_text()
    assert (
        re.search(rf"`(model\.\w+\.)?{re.escape(name)}\b", page)
        or f"_{name.removeprefix('sapo_temperature_')}`" in page
    )


def test_the_loss_table_has_the_codes_clips_and_aggregations() -> None:
    page = PAGE.read_text()
    for name, form in LOSS_FORMS.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[2] == f"`{form.aggregation}`", name
        if form.epsilon_low is None:
            assert cells[3] == "no clip"
        else:
            numbers = [float(number) for number in re.findall(r"[\d.]+(?:e-\d+)?", cells[3])]
            assert numbers == [form.epsilon_low, form.epsilon_high], name


def test_the_bias_table_has_every_preset_with_a_weight() -> None:
    bias = PAGE.read_text().split("### What each form costs")[1].split("\n## ")[0]
    assert {name for name, config in PRESETS.items() if not config.bypass} <= set(
        re.findall(r"^\| ([\w/]+) \|", bias, re.M)
    )


def fields(path: Path) -> list[tuple[str, str | None]]:
    """Each field of a dataclass in a file, with the text beneath it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef) or not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            continue
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
                found.append((f"{node.name}.{ast.unparse(statement.target)}", said or None))
    return found


SOURCES = sorted(path for room in ("app", "callbacks") for path in (PAGE.parent.parent / room).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PAGE.parent.parent)))
def test_every_field_is_explained_in_words_that_can_be_read_alone(path: Path) -> None:
    for name, said in fields(path):
        assert said is not None, f"{name} has no text"
        assert len(said.split()) > 3, f"{name}: {said!r} says nothing by itself"


if __name__ == "__main__":
    text = PAGE.read_text()
    for name, make in BLOCKS.items():
        span = block(text, name)
        text = text[: span.start()] + make() + "\n" + text[span.end() :]
    PAGE.write_text(text)
