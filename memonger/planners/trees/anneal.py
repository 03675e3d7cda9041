"""Simulated annealing of trees, compiled. The same seed gives the same result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.planners.annealing import MORE, acceptable, record
from memonger.planners.trees.price import evaluate
from memonger.planners.trees.trees import change
from memonger.support.compiled import compiled

SELDOM = 8  # tries for one with all match ranges


class Limits(NamedTuple):
    """What a tree may cost, and whether the least work is looked for instead of least memory."""

    most_bytes: int
    most_work: float
    by_work: bool


@compiled
def anneal(b, tree, limits, match_ranges, seed, tries, hot, cold, known, archive, stop, done):  # type: ignore[no-untyped-def]
    """Anneal a tree, and return the best that was visited.

    ``hot`` and ``cold`` are the temperatures at the beginning and at the end, as shares of the
    cost. Other match ranges than the one that is best for the start are tried on the best alone.
    The archive receives what is visited, ``known`` what it costs. The search ends
    when the element of ``stop``, which another thread may set, is not 0; that of ``done`` counts
    the tries.
    """
    np.random.seed(seed)
    most_bytes, most_work, by_work = limits
    pool, work, place = evaluate(b, tree, most_work, most_bytes, match_ranges, known)
    if pool < 0:
        return tree
    current = work if by_work else float(pool)
    best, best_pool, best_work = tree, pool, work
    for step in range(tries):
        if stop[0]:
            break
        done[0] += 1
        new = change(tree, len(b.node))
        while np.random.random() < MORE:
            new = change(new, len(b.node))
        if np.array_equal(new, tree):
            continue
        least = best_work if by_work else float(best_pool)
        draw = np.random.random()
        most = acceptable(current, hot * least, cold * least, step / tries, draw)
        if by_work:
            within = min(most, most_work), most_bytes
        else:
            within = most_work, int(min(most, float(most_bytes)))
        every = step % SELDOM == 0
        ranges = match_ranges if every else match_ranges[place : place + 1]
        pool, work, at = evaluate(b, new, within[0], within[1], ranges, known)
        if pool < 0:
            continue
        if not every and (work if by_work else pool) < least:
            every = True
            pool, work, at = evaluate(b, new, within[0], within[1], match_ranges, known)
        if every:
            place = at
        tree, current = new, work if by_work else float(pool)
        record(archive, pool, work, tree)
        if by_work:
            better = work < best_work or (work == best_work and pool < best_pool)
        else:
            better = pool < best_pool or (pool == best_pool and work < best_work)
        if better:
            best, best_pool, best_work = tree, pool, work
    return best
