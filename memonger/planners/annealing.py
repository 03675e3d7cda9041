"""Simulated annealing (Kirkpatrick et al. 1983, "Optimization by Simulated Annealing")."""

from __future__ import annotations

from typing import Iterator

import numpy as np

from memonger.planners.candidates import Point
from memonger.support.kernels import Struct, constant
from memonger.support.types import AnyArray, Doubles, Int64s, UInt64s

SLOTS = 2**15  # plans in the memo of each annealing


class Archive(Struct):
    """The fastest plan of each size."""

    most_bytes: int
    pools: Int64s
    seconds: Doubles
    states: AnyArray

    def points(self) -> Iterator[Point[AnyArray]]:
        """Yield copies of the archived plans, the smallest first."""
        for k in np.flatnonzero(np.isfinite(self.seconds)):
            yield Point(int(self.pools[k]), float(self.seconds[k]), self.states[k].copy())


def empty_archive(
    most_bytes: int, bins: int, shape: tuple[int, ...], dtype: type[np.generic]
) -> Archive:
    """Return an empty archive.

    Parameters
    ----------
    most_bytes : int
        The largest plan that it may hold.
    bins : int
        The number of sizes, each with one plan.
    shape : tuple of int
        The shape of the longest state.
    dtype : NumPy type
        The type of a state.
    """
    return Archive(
        max(1, most_bytes),
        np.zeros(bins, dtype=np.int64),
        np.full(bins, np.inf),
        np.zeros((bins, *shape), dtype=dtype),
    )


class Cooling(Struct):
    """The number of tries of an annealing, and its first and last temperature."""

    seed: int
    tries: int
    hot: float
    cold: float
    unit: float


class Memo(Struct):
    """A cache of the costs of plans, by their hash.

    An annealing has visited two fifths of its plans before. These are not evaluated again.
    """

    keys: UInt64s
    pools: Int64s
    limits: Doubles
    seconds: Doubles


def empty_memo(slots: int = SLOTS) -> Memo:
    """Return an empty memo for this number of plans."""
    keys = np.zeros(slots, dtype=np.uint64)
    pools = np.full(slots, constant("OVER_LIMIT"))
    limits = np.full(slots, float(constant("UNPRICED")))
    return Memo(keys, pools, limits, np.zeros(slots))
