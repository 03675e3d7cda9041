"""Set up before anything imports MXNet: one OpenMP thread, and the examples on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Iterator

# MXNet's CPU build is not repeatable with more: bit-for-bit comparisons need one.
os.environ["OMP_NUM_THREADS"] = "1"

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent / "examples")]

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# CI tries the same examples every time; a run by hand looks further.
settings.register_profile("repeated", derandomize=True, database=None)
if os.environ.get("CI"):
    settings.load_profile("repeated")


SHORTER = 50
LONG = ("full_search", "slow", "exhaustive")  # tests that search as long as a user does


@pytest.fixture(autouse=True)
def nothing_planned_before() -> Iterator[None]:
    """Every test plans for itself."""
    from memonger.support.cache import forget

    forget()
    yield


EFFORTS = ("memonger.planners.marks.search.EFFORT", "memonger.planners.trees.search.EFFORT")


def _efforts(times: float) -> list[Any]:
    """The effort of the searches for marks and for schedules, so many times as long."""
    from memonger.planners.marks import search as marks
    from memonger.planners.trees import search as trees

    return [marks.Effort().times(times), trees.Effort().times(times)]


@pytest.fixture(scope="session", autouse=True)
def measurements_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured here is not left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMONGER_CACHE", str(tmp_path_factory.mktemp("measured")))
        yield


@pytest.fixture(scope="session", autouse=True)
def short_search() -> Iterator[None]:
    """A fiftieth of the search: few tests depend on how good a plan is."""
    with pytest.MonkeyPatch.context() as patch:
        for name, effort in zip(EFFORTS, _efforts(1 / SHORTER)):
            patch.setattr(name, effort)
        yield


@pytest.fixture(autouse=True)
def full_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole search for tests that are marked so, and for slow ones."""
    if any(request.node.get_closest_marker(name) for name in LONG):
        for name, effort in zip(EFFORTS, _efforts(1)):
            monkeypatch.setattr(name, effort)
