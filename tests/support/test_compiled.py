"""Compiled functions behave as Python's do where a user would notice."""

import ctypes
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from memonger.support.compiled import compiled

from planned import run_python

pytestmark = pytest.mark.python_differs


@compiled
def filled(n):
    """Take a while, for a large n."""
    made = np.zeros(4)
    for i in range(n):
        made[i % 4] += i % 7
    return made, n


@compiled
def calls_another(n):
    return filled(n)[1]


def test_ctrl_c_while_compiled_code_runs() -> None:
    assert filled(8)[0].tolist() == [4, 6, 8, 3] and calls_another(8) == 8
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):  # until it comes
            filled(30_000_000)
    timer.join()


def test_ctrl_c_while_results_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of several parts: each has an error of its own, the one from the other."""

    def interrupted(*_: object) -> None:
        part, whole = SystemError("a part"), SystemError("the whole")
        part.__cause__, whole.__cause__ = KeyboardInterrupt(), part
        raise whole

    monkeypatch.setattr(type(filled).__mro__[1], "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled(8)


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_while_a_function_is_compiled(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LLVM calls back: what is raised there is lost, and what was to be done there is not done."""
    real = type(filled).__mro__[1].compile  # type: ignore[attr-defined]

    def called_back() -> None:
        raise KeyboardInterrupt

    def compile(self: object, signature: object) -> object:
        ctypes.CFUNCTYPE(None)(called_back)()
        if fails:
            raise RuntimeError("no compiled object yet")
        return real(self, signature)

    @compiled
    def added(n):
        return n + 1

    monkeypatch.setattr(type(filled).__mro__[1], "compile", compile)
    with pytest.raises(KeyboardInterrupt):
        added(8)
    monkeypatch.undo()
    assert added(8) == 9 and not capsys.readouterr().err


def test_other_mistakes_are_as_they_were() -> None:
    with pytest.raises(TypeError):
        filled(8, 9)  # type: ignore[call-arg]


@pytest.mark.slow
def test_nothing_is_read_outside_its_array(tmp_path: Path) -> None:
    """Compiled code does not look: the tests of the searches run again, with code that does."""
    tests = ["tests/planners/test_recursive.py", "tests/planners/test_search.py"]
    looking = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", *tests, **looking)
    assert done.returncode == 0, done.stdout


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
from test_compiled import filled
print(filled(8)[0].tolist())
"""


def test_a_full_disk_keeps_nothing_and_ends_nothing(tmp_path: Path) -> None:
    done = run_python("-c", FULL, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and done.stdout == "[4.0, 6.0, 8.0, 3.0]\n", done.stderr
    assert done.stderr == "compiling the search; this takes a minute, once after an installation\n"
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
