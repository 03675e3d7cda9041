"""The wings of the package: who may import whom, and who may touch MXNet."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "memonger"

#: From the ground up: a room imports from its own wing and from those before it.
WINGS = (
    "support",
    "graph.operators",
    "graph",
    "costs",
    "costs.time",
    "schedules",
    "planners",
    "planners.marks",
    "planners.trees",
    "schedules.execution",
    "solve",
    "api",
    "cli",
    "__main__",
)
STRANGERS = {"planners.marks", "planners.trees", "schedules.execution"}  # to one another

MXNET = {
    "support.mxnet",
    "support.symbols",
    "graph.operators.tensors",
    "graph.operators.gradients",
    "graph.inputs",
    "graph.read",
    "graph.marks",
    "costs.bind",
    "costs.time.measured",
    "costs.time.classes",
}
MXNET_WINGS = {"schedules.execution", "solve", "api", "cli"}


def rooms() -> dict[str, ast.Module]:
    """Every file of the package but its `__init__`: its dotted name below it, and its source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        if room != "__init__":
            found[room] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(source: ast.Module, known: set[str]) -> Iterator[str]:
    """The rooms that a file imports, also within functions."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("memonger.") for name in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memonger."):
            module = (node.module or "")[len("memonger.") :]
            for name in node.names:
                room = f"{module}.{name.name}"
                yield room if room in known else module


def wing_of(room: str) -> str:
    return room.rpartition(".")[0] or room


ROOMS = rooms()


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room: str) -> None:
    wing = wing_of(room)
    if room.endswith("__init__"):
        assert not list(imported(ROOMS[room], set(ROOMS)))
        return
    for other in imported(ROOMS[room], set(ROOMS)):
        below = wing_of(other)
        assert WINGS.index(below) <= WINGS.index(wing), other
        assert below == wing or not {below, wing} <= STRANGERS, other


def test_no_circle_between_files() -> None:
    below: dict[str, list[str]] = {
        room: list(imported(source, set(ROOMS))) for room, source in ROOMS.items()
    }
    while below:
        free = [room for room, others in below.items() if not set(others) & set(below)]
        assert free, sorted(below)
        for room in free:
            del below[room]


@pytest.mark.parametrize("room", ROOMS)
def test_mxnet_is_touched_where_it_may_be(room: str) -> None:
    touched = any(
        (isinstance(node, ast.ImportFrom) and any(n.name == "mx" for n in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mxnet"))
        or (isinstance(node, ast.Import) and any(n.name == "mxnet" for n in node.names))
        for node in ast.walk(ROOMS[room])
    )
    assert not touched or room in MXNET or wing_of(room) in MXNET_WINGS


def test_compiled_code_reads_only_what_its_cache_depends_on() -> None:
    """The cache of compiled functions depends on the files that have some (`support.compiled`)."""
    compiled = {room for room, source in ROOMS.items() if any(kernels(source))}
    assert len(compiled) > 5
    for room in sorted(compiled):
        origin = {
            name.asname or name.name: (node.module or "")[len("memonger.") :]
            for node in ROOMS[room].body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memonger.")
            for name in node.names
        }
        for kernel in kernels(ROOMS[room]):
            for node in (part for statement in kernel.body for part in ast.walk(statement)):
                if isinstance(node, ast.Name) and node.id in origin:
                    assert origin[node.id] in compiled, (room, kernel.name, node.id)


def kernels(source: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in source.body:
        if isinstance(node, ast.FunctionDef):
            if any(isinstance(d, ast.Name) and d.id == "compiled" for d in node.decorator_list):
                yield node
