"""Set up before anything imports MXNet: one OpenMP thread, and the examples on the path."""

from __future__ import annotations

import dataclasses
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

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Networks take their time. CI tries the same examples every time; a run by hand looks further.
every: Any = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("by hand", **every)
settings.register_profile("CI", **every, derandomize=True, database=None)
settings.load_profile("CI" if os.environ.get("CI") else "by hand")

SHORTER = {"marks": 20, "schedules": 50}
LONG = ("full_search", "slow", "exhaustive")  # tests that search as long as a user does


def scaled(patch: pytest.MonkeyPatch, marks_times: float, times: float) -> None:
    """Make the searches for marks and for schedules so many times as long as a user's."""
    from memonger.planners.marks import search as marks
    from memonger.planners.trees import search as trees

    patch.setattr(marks, "EFFORT", marks.Effort().times(marks_times))
    effort: Any = trees.Effort()
    longer = {k: int(times * getattr(effort, k)) for k in ("replays", "replays_near", "annealing")}
    patch.setattr(trees, "EFFORT", dataclasses.replace(effort, **longer))


@pytest.fixture(scope="session", autouse=True)
def all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Short searches, for few tests depend on how good a plan is; and a cache of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMONGER_CACHE", str(tmp_path_factory.mktemp("measured")))
        scaled(patch, 1 / SHORTER["marks"], 1 / SHORTER["schedules"])
        yield


@pytest.fixture(autouse=True)
def each_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test plans for itself; those that are marked so, and slow ones, search in full."""
    from memonger.support.cache import forget

    forget()
    if any(request.node.get_closest_marker(name) for name in LONG):
        scaled(monkeypatch, 1, 1)
