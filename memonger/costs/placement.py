"""Place tensors with known lifetimes in one arena (dynamic storage allocation).

The problem is NP-hard. Items are placed one by one, the largest first, into the lowest gap that
fits; some order of the items gives the smallest arena. If the arena is larger than the most bytes
alive at once, simulated annealing changes the order: it swaps an item at the top of the arena, or
one that is alive with it, with another item that is alive with it, and keeps the change if the
arena is not much larger. Of more than 8 items, those smaller than a 500th of the bytes alive come
last.
"""

from __future__ import annotations

import numpy as np

from memonger.support.kernels import compiled
from memonger.support.types import Int32s, Int64s

EFFORT = 5 * 10**8  # limit of the items that annealing visits: about a second
SMALL = 500  # items smaller than this fraction of the bytes alive come last,
FEW = 8  # unless there are no more items than this


def place_items(
    start: Int32s, stop: Int32s, nbytes: Int64s, steps: int, alignment: int
) -> tuple[Int64s, int]:
    """Place items in an arena so that items that are alive at the same time do not overlap.

    Parameters
    ----------
    start, stop : np.ndarray
        (items,) of int32: the first and the last step in which each item is alive.
    nbytes : np.ndarray
        (items,) of int64: the size of each item in bytes.
    steps : int
        The number of steps.
    alignment : int
        Offsets are multiples of this number of bytes.

    Returns
    -------
    offset : array of int64, (items,)
        The offset of each item in bytes.
    arena_bytes : int
    """
    size = -(-nbytes // alignment) * alignment
    change = np.bincount(start, size, steps + 1) - np.bincount(stop + 1, size, steps + 1)
    alive = int(np.cumsum(change).astype(np.int64)[:-1].max(initial=0))
    order = np.lexsort((start, -size))
    is_few = len(size) <= FEW
    large = len(size) if is_few else int(np.count_nonzero(size * SMALL >= alive))
    offset = np.zeros(len(size), dtype=np.int64)
    effort = min(EFFORT, 1000 * large**3)
    offset[order] = compiled.place(start[order], stop[order], size[order], large, alive, effort)
    return offset, int((offset + size).max(initial=0))
