"""Set up before anything imports MXNet: one OpenMP thread, and the examples on the path."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Iterator

# MXNet's CPU build is not repeatable with more: bit-for-bit comparisons need one.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell has the jobs in its background ignore Ctrl-C; the tests of it do not.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent / "examples")]

import memonger  # noqa: E402, F401  MXNet cannot be imported before it on NumPy 2
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Networks take their time. CI tries the same examples every time; a run by hand looks further.
every: Any = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("by hand", **every)
settings.register_profile("CI", **every, derandomize=True, database=None)
settings.load_profile("CI" if os.environ.get("CI") else "by hand")

LONG = ("full_search", "slow", "exhaustive")  # tests that search as long as a user does


@pytest.fixture(scope="session", autouse=True)
def all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make searches short, and a cache of our own."""
    from efforts import SHORT, use

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMONGER_CACHE", str(tmp_path_factory.mktemp("cache")))
        use(SHORT, patch.setattr)
        yield


@pytest.fixture(autouse=True, scope="module")
def each_module() -> None:
    from memonger.support.cache import forget

    forget()


@pytest.fixture(autouse=True)
def each_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test plan for itself, but for those of ``one_plan``.

    Those that are marked so, and slow ones, search in full.
    """
    from efforts import USUAL, use
    from memonger.support.cache import forget

    if not request.node.get_closest_marker("one_plan"):
        forget()
    if any(request.node.get_closest_marker(name) for name in LONG):
        use(USUAL, monkeypatch.setattr)
