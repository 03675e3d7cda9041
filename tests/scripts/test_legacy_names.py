"""``memonger run`` supplies names that NumPy and Python have removed, and tells which were used."""

from __future__ import annotations

from pathlib import Path

import pytest

from planned import run_python

pytestmark = pytest.mark.python_differs

#: NumPy 1.23 has no asscalar, Python 3.8 no clock; both have the others, or had them until then.
SCRIPT = """
import sys, time
assert "numpy" not in sys.modules  # what the script sets before it imports NumPy holds
before = time.clock()
import numpy as np
from numpy import asscalar
print(asscalar(np.ones(1, np.float)), np.product([2, 3]), np.int is int, time.clock() >= before)
print(np.array([1], np.long).dtype, hasattr(np, "nothing"), hasattr(time, "nothing"))
"""


def run(folder: Path, *options: str) -> tuple[int, str, list[str]]:
    (folder / "script.py").write_text(SCRIPT)
    command = ["-W", "ignore", "-m", "memonger", "run", *options, "script.py"]
    done = run_python(*command, folder=folder)
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_names_mean_what_they_meant_and_are_told(tmp_path: Path) -> None:
    status, printed, (said,) = run(tmp_path)
    assert (status, printed) == (0, "1.0 6 True True\nint64 False False\n")
    assert said.startswith("memonger: supplied time.clock, numpy.asscalar, ")
    assert said.endswith(
        "which NumPy or Python has removed since; --no-legacy-names leaves them out"
    )


def test_they_can_be_left_out(tmp_path: Path) -> None:
    status, printed, said = run(tmp_path, "--no-legacy-names")
    assert (status, printed) == (1, "") and "has no attribute 'clock'" in said[-1]


def test_a_script_that_uses_none_is_told_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import numpy as np, time; print(np.float64(1) + 1)")
    done = run_python("-W", "ignore", "-m", "memonger", "run", "plain.py", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
