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


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it; `from package import module` is the module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inside}
    return names


def test_every_room_has_its_layer():
    rooms = {room(module_of(path)) for path in FILES} - {"app"}
    assert rooms == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = room(module_of(path))
    if own == "app":
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


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: imported(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle: {' -> '.join((*way, name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_room_is_a_storeroom():
    lines: dict[str, int] = {}
    for path in FILES:
        own = room(module_of(path))
        lines[own] = lines.get(own, 0) + path.read_text().count("\n")
    assert {name: count for name, count in lines.items() if count > 2000} == {"app.audit": lines["app.audit"]}
    assert (ROOT / "app" / "training" / "module.py").read_text().count("\n") <= 250


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_outside_the_guards_writes_to_the_state_of_the_control(path):
    if path.parent.name == "guards":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []:
            assert ".run_control." not in f".{ast.unparse(target)}", f"{path}:{node.lineno}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("run_control"):
            assert not node.attr.startswith("_"), f"{path}:{node.lineno}"
