"""The subpackages of memonger: which may import which, and which may use MXNet."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterable, Iterator

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "memonger"

#: From the ground up: a module imports from its own package and from those before it.
PACKAGES = (
    "support graph.operators graph costs.time costs schedules planners planners.marks "
    "planners.trees schedules.execution solve show api gluon scripts public cli __main__"
).split()
UNRELATED = {"planners.marks", "planners.trees", "schedules.execution"}  # to one another

MXNET = (
    "support.mxnet support.variables support.versions support.symbols graph.operators.tensors "
    "graph.operators.gradients graph.inputs graph.read graph.marks costs.bind costs.time.measured"
).split()
MXNET_PACKAGES = ("schedules.execution", "solve", "api", "gluon", "scripts", "cli")

#: Every file of the package but its `__init__`: its dotted name below it, and its source.
MODULES = {
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
    """Return the modules that a file imports, also within functions."""
    for module, name, _ in imports(ast.walk(source)):
        if module[:1] == ".":
            full = f"{module}.{name}"[1:]
            yield full if full in MODULES else module[1:]


def without_types(source: ast.Module) -> ast.Module:
    """A file without its imports under ``TYPE_CHECKING``, which never run."""
    tests = (getattr(node, "test", None) for node in source.body)
    names = [getattr(test, "id", "") for test in tests]
    body = [node for node, name in zip(source.body, names) if name != "TYPE_CHECKING"]
    return ast.Module(body=body, type_ignores=[])


def package_of(module: str) -> str:
    return module.rpartition(".")[0] or module


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    package = package_of(module)
    if module.endswith("__init__"):  # the public names of a package, if it has any
        assert {package_of(below) for below in imported(MODULES[module])} <= {package}
    else:
        for below in map(package_of, imported(MODULES[module])):
            assert PACKAGES.index(below) <= PACKAGES.index(package)
            assert below == package or not {below, package} <= UNRELATED


def test_no_circle_between_files() -> None:
    """Imports of types alone included."""
    below = {module: set(imported(source)) for module, source in MODULES.items()}
    while below:
        free = [module for module, others in below.items() if not others & set(below)]
        assert free, sorted(below)
        for module in free:
            del below[module]


@pytest.mark.parametrize("module", MODULES)
def test_mxnet_is_touched_where_it_may_be(module: str) -> None:
    touched = any(
        name == "mx" or module.split(".")[0] == "mxnet"
        for module, name, _ in imports(ast.walk(without_types(MODULES[module])))
    )
    assert not touched or module in MXNET or package_of(module) in MXNET_PACKAGES


@pytest.mark.parametrize("source", [*PACKAGE.rglob("*.[ch]")], ids=lambda path: path.name)
def test_includes_go_down(source: Path) -> None:
    """Compiled code stands beside the Python file of its name, and its header goes before it."""
    module = source.relative_to(PACKAGE).with_suffix("")
    included = re.findall(r'#include "(.*)\.h"', source.read_text(encoding="utf-8"))
    assert module.as_posix().replace("/", ".") in MODULES
    assert source.suffix == ".h" or included[0] == module.as_posix()
    for below in (package_of(name.replace("/", ".")) for name in included):
        assert PACKAGES.index(below) <= PACKAGES.index(
            package_of(module.as_posix().replace("/", "."))
        )
