"""Simulated annealing (Kirkpatrick et al. 1983, "Optimization by Simulated Annealing")."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from memonger.support.compiled import compiled

MORE = 0.3  # the probability of one more change in a step
SLOTS = 2**15  # for plans whose cost is known, in each annealing
FNV_PRIME, FNV_OFFSET = np.uint64(1099511628211), np.uint64(14695981039346656037)


@compiled
def acceptable(current, hot, cold, done, draw):  # type: ignore[no-untyped-def]
    """The most that the next state may cost, for a random number from 0 to 1 (Metropolis).

    The temperature falls from ``hot`` to ``cold``; ``done`` is the part of the tries that is over.
    """
    return current - hot * (cold / hot) ** done * np.log(1 - draw)


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


@compiled
def record(archive, pool, seconds, state):  # type: ignore[no-untyped-def]
    """Take a plan into the archive if it is the fastest of its size."""
    if pool > archive.most:
        return
    k = max(0, (pool * len(archive.seconds) - 1) // archive.most)
    if seconds < archive.seconds[k] or (seconds == archive.seconds[k] and pool < archive.pools[k]):
        archive.pools[k] = pool
        archive.seconds[k] = seconds
        archive.states[k, : len(state)] = state


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


@compiled
def slot_of(known, plan, kind):  # type: ignore[no-untyped-def]
    """The slot of a plan, an array of integers, evaluated in this way (Fowler, Noll and Vo)."""
    key = FNV_OFFSET ^ np.uint64(kind)
    for item in plan:
        key = (key ^ np.uint64(item)) * FNV_PRIME
    slot = np.int64((key ^ (key >> np.uint64(32))) % np.uint64(len(known.keys)))
    if known.keys[slot] != key:
        known.keys[slot], known.pools[slot], known.limits[slot] = key, -1, -1
    return slot
