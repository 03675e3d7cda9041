"""Simulated annealing (Kirkpatrick et al. 1983, "Optimization by Simulated Annealing")."""

from __future__ import annotations

from typing import Any

import numpy as np

from memonger.support.kernels import Struct

SLOTS = 2**15  # for plans whose cost is known, in each annealing


class Archive(Struct):
    """The fastest plan of each size."""

    most: int


def empty_archive(most: int, bins: int, shape: tuple[int, ...], dtype: Any) -> Archive:
    """Make an archive for plans of at most so many bytes, with states of at most this shape."""
    return Archive(
        max(1, most),
        np.zeros(bins, dtype=np.int64),
        np.full(bins, np.inf),
        np.zeros((bins, *shape), dtype=dtype),
    )


class Known(Struct):
    """What plans cost, by their hash.

    No plan is replayed twice while it is known: two fifths of those that annealing comes to have
    been there before.
    """


def nothing_known(slots: int = SLOTS) -> Known:
    """Make room for so many plans."""
    keys = np.zeros(slots, dtype=np.uint64)
    return Known(keys, np.full(slots, -1), np.full(slots, -1.0), np.zeros(slots))
