"""Rooms import downwards only, and one room imports vLLM."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"app.errors", "app.renamed", "app.types", "app.versions", "app.world"},
    {"app.checkpoint"},
    {"app.maths", "app.weights", "app.builtin"},
    {"app.metrics", "app.data", "app.rewards"},
    {"app.dashboard", "app.engine"},
    {"app.rollout"},
    {"app.policy", "app.sync"},
    {"app.guards", "app.distributed"},
    {"app.training"},
    {"app.replay", "app.audit"},
    {"callbacks"},
    {"app.trainer"},
    {"app.cli"},
    {"app.__main__"},
]
FILES = sorted([*(ROOT / "app").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")])


def room(module: str) -> str:
    """The room a module belongs to: the first two parts under app, callbacks otherwise."""
    return "callbacks" if module.startswith("callbacks") else ".".join(module.split(".")[:2])


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_every_room_has_its_layer():
    rooms = {room(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in FILES} - {"app.__init__"}
    assert rooms == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own == "app.__init__":
        return
    level = next(i for i, layer in enumerate(LAYERS) if own in layer)
    below = set().union(*LAYERS[:level], {own})
    for module in imported(path):
        if module.split(".")[0] in ("app", "callbacks"):
            assert room(module) in below, f"{path} imports {module}"


def test_one_room_imports_vllm():
    by_statement = [path for path in FILES if any(name.split(".")[0] == "vllm" for name in imported(path))]
    by_name = [path for path in FILES if 'import_module("vllm' in path.read_text()]
    assert {path.parent for path in [*by_statement, *by_name]} == {ROOT / "app" / "engine" / "vllm"}
