"""What is installed: the requirements, what a wheel and an sdist hold, and how they are built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import memonger
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from planned import ROOT

COMPILED = re.compile(r"\.(so|tmp|py[cod])$|__pycache__")


def numpy_for(python: str, requirements: list[Requirement]) -> list[str]:
    """Return which versions of NumPy are required on this Python."""
    here = {"python_version": python}
    of_numpy = [requirement for requirement in requirements if requirement.name == "numpy"]
    return [str(r.specifier) for r in of_numpy if not r.marker or r.marker.evaluate(here)]


def test_requirements_are_those_of_the_extra() -> None:
    """But for NumPy: of all versions that the extra lets in, they name one for each Python."""
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if not line.startswith("#")]
    extra = [Requirement(line) for line in extras["cu112"]]
    test = [Requirement(line) for line in extras["test"]]
    assert {requirement for requirement in listed if requirement.name != "numpy"} == {
        *(requirement for requirement in extra if requirement.name != "numpy"),
        *(requirement for requirement in test if requirement.name == "pytest"),
    }
    extra += [Requirement(line) for line in project["dependencies"]]
    for python in ("3.8", "3.11", "3.12", "3.13"):
        (pinned,) = numpy_for(python, listed)  # ==1.23.5
        assert all(pinned[2:] in SpecifierSet(allowed) for allowed in numpy_for(python, extra))


def tracked() -> set[str]:
    """Return the project's files, as git knows them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if listed.returncode:
        pytest.skip("this is no clone of git")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_an_sdist_has_all_and_a_wheel_what_is_used(tmp_path: Path) -> None:
    listed, built = str(tmp_path), str(tmp_path / "built")
    commands = ["setup.py", "-q", "egg_info", "-e", listed, "build_py", "-d", built]
    subprocess.run([sys.executable, "-W", "ignore", *commands], cwd=ROOT, check=True)
    (egg_info,) = tmp_path.glob("*.egg-info")
    assert f"\nVersion: {memonger.__version__}\n" in (egg_info / "PKG-INFO").read_text()
    lines = (egg_info / "SOURCES.txt").read_text().splitlines()
    sources = {line for line in lines if not line.startswith("/")}
    assert not [name for name in sources if COMPILED.search(name)]
    files = tracked()
    assert files - sources == {".gitignore"}
    packaged = {str(path.relative_to(built)) for path in Path(built).rglob("*") if path.is_file()}
    ours = re.compile(r"memonger/.*(?<!\.[ch])|memonger_command\.py")
    wanted = {name for name in files if ours.fullmatch(name)}
    assert {name for name in packaged if not COMPILED.search(name)} == wanted
    assert not [name for name in packaged if name.endswith(".so")]


@pytest.mark.slow
def test_two_builds_at_once_write_nothing_into_the_tree(tmp_path: Path) -> None:
    """They give one wheel for every Python; an editable build is beside the sources."""
    tree = tmp_path / "tree"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    before = {path: path.stat().st_mtime_ns for path in [tree, *tree.rglob("*")]}
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(tree), "-w"]
    builds = [
        subprocess.Popen([*pip, str(tmp_path / name)], env=environment) for name in ("one", "two")
    ]
    assert [build.wait() for build in builds] == [0, 0]
    assert {path: path.stat().st_mtime_ns for path in [tree, *tree.rglob("*")]} == before
    for wheel in tmp_path.glob("*/*.whl"):
        assert re.fullmatch(r"memonger-.*-py3-none-linux_\w+\.whl", wheel.name)
        assert "memonger/support/libkernels.so" in zipfile.ZipFile(wheel).namelist()
