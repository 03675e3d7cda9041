"""Simulated annealing (Kirkpatrick et al. 1983, "Optimization by Simulated Annealing")."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from memonger.support.kernels import call

SLOTS = 2**15  # for plans whose cost is known, in each annealing


class Archive(NamedTuple):
    """The fastest plan of each size; of n, plan k needs at most k + 1 n-ths of ``most`` bytes."""

    most: int
    pools: np.ndarray
    seconds: np.ndarray  # or work
    states: np.ndarray  # of each plan; what follows a state that is shorter means nothing


def empty_archive(most: int, bins: int, shape: tuple[int, ...], dtype: Any) -> Archive:
    """Make an archive for plans of at most so many bytes, with states of at most this shape."""
    return Archive(
        max(1, most),
        np.zeros(bins, dtype=np.int64),
        np.full(bins, np.inf),
        np.zeros((bins, *shape), dtype=dtype),
    )


def record(archive: Archive, pool: int, seconds: float, state: np.ndarray) -> None:
    """Take a plan into the archive if it is the fastest of its size.

    A state that is longer than those of the archive is a ValueError.
    """
    call("record", archive, pool, seconds, np.ascontiguousarray(state, archive.states.dtype))


class Known(NamedTuple):
    """What plans cost, by their hash; one takes the place of another that has the same slot.

    No plan is replayed twice while it is known: two fifths of those that annealing comes to have
    been there before.
    """

    keys: np.ndarray
    pools: np.ndarray  # bytes; -1: more than the limit
    limits: np.ndarray  # bytes; -1: nothing is known
    others: np.ndarray  # what else the search wants to know of a plan


def nothing_known(slots: int = SLOTS) -> Known:
    """Make room for so many plans."""
    keys = np.zeros(slots, dtype=np.uint64)
    return Known(keys, np.full(slots, -1), np.full(slots, -1.0), np.zeros(slots))
