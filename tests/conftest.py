"""Set up before anything imports MXNet: one OpenMP thread, and the examples on the path."""

import os
import sys
from pathlib import Path
from typing import Iterator

# MXNet's CPU build is not repeatable with more: bit-for-bit comparisons need one.
os.environ["OMP_NUM_THREADS"] = "1"

TESTS = Path(__file__).resolve().parent
for folder in (TESTS, TESTS.parent / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# CI tries the same examples every time; a run by hand looks further.
settings.register_profile("repeated", derandomize=True, database=None)
if os.environ.get("CI"):
    settings.load_profile("repeated")


SHORTER = 50


@pytest.fixture(autouse=True)
def nothing_planned_before() -> Iterator[None]:
    """Every test plans for itself."""
    from memonger.plans import forget

    forget()
    yield


@pytest.fixture(scope="session", autouse=True)
def short_search() -> Iterator[None]:
    """A fiftieth of the search: few tests depend on how good a plan is."""
    from memonger.planners import smallest

    full = smallest.WORK, smallest.MOST_TRIES
    smallest.WORK, smallest.MOST_TRIES = full[0] // SHORTER, full[1] // SHORTER
    yield
    smallest.WORK, smallest.MOST_TRIES = full


@pytest.fixture(autouse=True)
def full_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole search for tests that are marked so, and for slow ones."""
    if any(request.node.get_closest_marker(name) for name in ("full_search", "slow")):
        from memonger.planners import smallest

        monkeypatch.setattr(smallest, "WORK", smallest.WORK * SHORTER)
        monkeypatch.setattr(smallest, "MOST_TRIES", smallest.MOST_TRIES * SHORTER)
