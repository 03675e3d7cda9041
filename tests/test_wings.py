"""The wings of the package: who may import whom, and who may touch MXNet."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterable, Iterator

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "memonger"

#: From the ground up: a room imports from its own wing and from those before it.
WINGS = (
    "support graph.operators graph costs costs.time schedules planners planners.marks "
    "planners.trees schedules.execution solve api gluon scripts public cli __main__"
).split()
STRANGERS = {"planners.marks", "planners.trees", "schedules.execution"}  # to one another

MXNET = (
    "support.mxnet support.variables support.versions support.symbols graph.operators.tensors "
    "graph.operators.gradients graph.inputs graph.read graph.marks costs.bind costs.time.measured"
).split()
MXNET_WINGS = ("schedules.execution", "solve", "api", "gluon", "scripts", "cli")

#: Every file of the package but its `__init__`: its dotted name below it, and its source.
ROOMS = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): ast.parse(
        path.read_text(encoding="utf-8")
    )
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent != PACKAGE or path.stem != "__init__"
}


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, str]]:
    """Yield the module (``.`` is the package), the name in it, and what that is called here."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("memonger.")
                yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = re.sub(r"^memonger\.", ".", node.module or "")
                yield module, alias.name, alias.asname or alias.name


def imported(source: ast.Module) -> Iterator[str]:
    """Return the rooms that a file imports, also within functions."""
    for module, name, _ in imports(ast.walk(source)):
        if module[:1] == ".":
            room = f"{module}.{name}"[1:]
            yield room if room in ROOMS else module[1:]


def without_types(source: ast.Module) -> ast.Module:
    """A file without its imports under ``TYPE_CHECKING``, which never run."""
    tests = (getattr(node, "test", None) for node in source.body)
    names = [getattr(test, "id", "") for test in tests]
    body = [node for node, name in zip(source.body, names) if name != "TYPE_CHECKING"]
    return ast.Module(body=body, type_ignores=[])


def wing_of(room: str) -> str:
    return room.rpartition(".")[0] or room


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room: str) -> None:
    wing = wing_of(room)
    if room.endswith("__init__"):  # the public names of a wing, if it has any
        assert {wing_of(below) for below in imported(ROOMS[room])} <= {wing}
    else:
        for below in map(wing_of, imported(ROOMS[room])):
            assert WINGS.index(below) <= WINGS.index(wing)
            assert below == wing or not {below, wing} <= STRANGERS


def test_no_circle_between_files() -> None:
    below = {room: set(imported(without_types(source))) for room, source in ROOMS.items()}
    while below:
        free = [room for room, others in below.items() if not others & set(below)]
        assert free, sorted(below)
        for room in free:
            del below[room]


@pytest.mark.parametrize("room", ROOMS)
def test_mxnet_is_touched_where_it_may_be(room: str) -> None:
    touched = any(
        name == "mx" or module.split(".")[0] == "mxnet"
        for module, name, _ in imports(ast.walk(without_types(ROOMS[room])))
    )
    assert not touched or room in MXNET or wing_of(room) in MXNET_WINGS


@pytest.mark.parametrize("source", [*PACKAGE.rglob("*.[ch]")], ids=lambda path: path.name)
def test_includes_go_down(source: Path) -> None:
    """Compiled code stands beside the Python file of its name, and its header goes before it."""
    room = source.relative_to(PACKAGE).with_suffix("")
    included = re.findall(r'#include "(.*)\.h"', source.read_text(encoding="utf-8"))
    assert room.as_posix().replace("/", ".") in ROOMS
    assert source.suffix == ".h" or included[0] == room.as_posix()
    for below in (wing_of(name.replace("/", ".")) for name in included):
        assert WINGS.index(below) <= WINGS.index(wing_of(room.as_posix().replace("/", ".")))
