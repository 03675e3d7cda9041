"""Where pieces of a network may begin and end: at few boundaries, where little is alive."""

import numpy as np

ENOUGH = 1.25  # times the cuts that are wanted: all of them are taken


def boundaries(alive: np.ndarray, lo: int, hi: int, most: int) -> np.ndarray:
    """At most so many boundaries between two positions, and these: where little is alive.

    All of them if they are few; otherwise local minima, of these the deepest (the local minima
    among them) as long as there are enough, or if there are few others as well; the least of each
    of as many equal stretches.
    """
    inside = np.arange(lo + 1, hi)
    if len(inside) > most:
        low = _minima(alive, inside)
        deeper = _minima(alive, low)
        while most <= len(deeper) < len(low):
            low, deeper = deeper, _minima(alive, deeper)
        if len(low) > ENOUGH * most:
            low = _least_of_stretches(alive, low, most)
        rest = np.setdiff1d(inside, low)
        inside = np.union1d(low, _least_of_stretches(alive, rest, max(0, most - len(low))))
    return np.concatenate([[lo], inside, [hi]]).astype(np.int32)


def _minima(alive: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Of some positions those at which less is alive than at their neighbours among them."""
    here = np.concatenate([[np.inf], alive[where], [np.inf]])
    return where[(here[1:-1] <= here[:-2]) & (here[1:-1] < here[2:])]


def _least_of_stretches(alive: np.ndarray, where: np.ndarray, most: int) -> np.ndarray:
    if len(where) <= most:
        return where
    stretches = np.array_split(where, most) if most else []
    return np.array([part[np.argmin(alive[part])] for part in stretches], dtype=np.int64)
