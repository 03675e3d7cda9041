"""Place tensors that are alive at known times in one arena: dynamic storage allocation.

The problem is NP-hard. Items are put one by one, the largest first, into the lowest gap that fits;
some order gives the smallest arena. Where the arena is larger than what is alive at once, the order
is changed: an item that lies too high, or one alive with it, takes the place of one alive with it,
and a change is kept if the arena is not much worse (simulated annealing). Items of less than a
500th of what is alive come last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.support.kernels import compiled
from memonger.support.types import Int32s, Int64s

EFFORT = 5 * 10**8  # items that are looked at, at most: a second
SMALL = 500  # items of less than this part of what is alive come last


class Placement(NamedTuple):
    """Where items lie in one arena."""

    nbytes: int  # of the arena
    offset: Int64s  # of each item, in bytes
    alive: int  # the most bytes that are alive at once: no arena is smaller


def place_items(
    start: Int32s, stop: Int32s, nbytes: Int64s, steps: int, alignment: int
) -> Placement:
    """Place items in an arena so that none overlap that are alive at the same time.

    Parameters
    ----------
    start, stop : np.ndarray
        int32, of each item the first and the last step in which it is alive.
    nbytes : np.ndarray
        int64, of each item.
    steps : int
        How many steps there are.
    alignment : int
        Offsets are multiples of so many bytes.
    """
    size = -(-nbytes // alignment) * alignment
    change = np.bincount(start, size, steps + 1) - np.bincount(stop + 1, size, steps + 1)
    alive = int(np.cumsum(change).astype(np.int64)[:-1].max(initial=0))
    order = np.lexsort((start, -size))
    large = int(np.count_nonzero(size * SMALL >= alive))
    offset = np.zeros(len(size), dtype=np.int64)
    effort = min(EFFORT, 1000 * large**3)
    offset[order] = compiled.place(start[order], stop[order], size[order], large, alive, effort)
    return Placement(int((offset + size).max(initial=0)), offset, alive)
