"""Simulated annealing of trees, compiled. The same seed gives the same result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.planners.annealing import Archive, Known
from memonger.planners.trees.price import Problem
from memonger.support.kernels import call


class Limits(NamedTuple):
    """What a tree may cost, and whether the least work is looked for instead of least memory."""

    most_bytes: int
    most_work: float
    by_work: bool


def anneal(
    b: Problem,
    tree: np.ndarray,
    limits: Limits,
    seed: int,
    tries: int,
    hot: float,
    cold: float,
    known: Known,
    archive: Archive,
    stop: np.ndarray,
    done: np.ndarray,
) -> np.ndarray:
    """Anneal a tree, and return the best that was visited.

    ``hot`` and ``cold`` are the temperatures at the beginning and at the end, as shares of the
    cost. The archive receives what is visited, ``known`` what it costs. The search ends when the
    element of ``stop``, which another thread may set, is not 0; that of ``done`` counts the tries.
    """
    to = seed, tries, hot, cold, known, archive, stop, done
    best: np.ndarray = call("anneal_trees", b, tree, limits, *to)
    return best.reshape(-1, 2)
