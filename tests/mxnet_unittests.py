"""Run MXNet's own unit tests on two Pythons, and list what passes on the first alone.

    python tests/mxnet_unittests.py MXNET PYTHON NEWER_PYTHON [test_symbol.py ...]

MXNET is a checkout of the release that both Pythons have (``git clone --branch 1.9.1``). Both need
pynose, pytest, pytest-timeout and scipy; the first imports MXNet alone, the newer one with
memonger. There the tests' own numpy gets the names that it has lost, as a script's does by
``memonger run``. A test that takes over a minute fails, and a file ends after five. One file after
another takes an hour on one core, and the ten that say most (by default) five minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from pathlib import Path
from typing import Any

FILES = [
    f"test_{name}.py"
    for name in (
        "symbol ndarray init recordio metric numpy_ndarray gluon_rnn module optimizer loss".split()
    )
]
OUTCOME = re.compile(r"^(test_\w+\.py::\S+) (PASSED|FAILED|ERROR)", re.M)


def pytest_configure(config: Any) -> None:
    """Make this file a plugin of pytest for the newer Python."""
    import numpy
    from memonger.support.numpy1 import LOST

    for name, value in LOST.items():
        if name not in vars(numpy):
            setattr(numpy, name, value)


def outcomes(folder: Path, python: str, name: str, *plugin: str) -> dict[str, str]:
    """Run a file of MXNet's tests; PASSED, FAILED or ERROR of each of its tests."""
    here = Path(__file__).resolve()
    variables = {
        "OMP_NUM_THREADS": "1",
        "MXNET_TEST_SEED": "1",
        "MXNET_MODULE_SEED": "1",
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parents[1])]) if plugin else "",
    }
    options = ["-p", "no:cacheprovider", "--timeout", "60", "--session-timeout", "300", "-v"]
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "pytest", *options, *plugin, name],
        cwd=folder / "tests" / "python" / "unittest",
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(OUTCOME.findall(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    parser.add_argument("mxnet", type=Path)
    parser.add_argument("pythons", nargs=2)
    parser.add_argument("files", nargs="*", default=FILES)
    options = parser.parse_args()
    if not (options.mxnet / "tests" / "python" / "unittest").is_dir():
        parser.error(f"{options.mxnet} is no checkout of MXNet: it has no tests/python/unittest")
    old, new = options.pythons
    for name in options.files:
        before = outcomes(options.mxnet, old, name)
        after = outcomes(options.mxnet, new, name, "-p", Path(__file__).stem)
        passed = [{t for t in run if run[t] == "PASSED"} for run in (before, after)]
        print(f"{name}: {len(passed[0])} pass on {old}, {len(passed[1])} on {new}")
        for test in sorted(passed[0] - passed[1]):
            print(f"    {test} {after.get(test, 'did not run')} there")


if __name__ == "__main__":
    main()
