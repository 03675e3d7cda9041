"""Trees of cuts annealed on the exact cost of their schedules.

A step moves, adds or drops a cut, replaces a node by one of its children, or changes what is held
of its left part. Steps for the worse are taken with a probability that falls as the search cools
(Kirkpatrick et al. 1983). The same seed gives the same result on every machine.
"""

from __future__ import annotations

import hashlib
import math
import random
from typing import Callable, NamedTuple

import numpy as np

from memonger.planners.trees.judge import Blueprint, judge
from memonger.planners.trees.unroll import ALIVE, ALL, LEAF, NOTHING, part_of, unroll

#: The factors that MXNet tries (``Settings.match_ranges``).
MATCH_RANGES = np.array([1, 2, 4, 8, 16])
ENDLESS = 2**60
FEW = 3  # times the forward operators per unit of work: more runs than that are of no use
SELDOM = 8  # tries for one with all match ranges
AGAIN = 0.3  # the probability of one more change in a step

LEAF_NODE = np.array([[LEAF, 0]], dtype=np.int32)


class Cost(NamedTuple):
    """Bytes of the pool and work of a tree's schedule; ``pool_bytes`` is -1 if over a limit."""

    pool_bytes: int
    work: float
    match_range: int  # the place of the best one


class Annealed(NamedTuple):
    """The best tree of an annealing, and its cost."""

    tree: np.ndarray
    pool_bytes: int
    work: float


class _Unrolled(NamedTuple):
    work: float
    events: bytes  # a digest; empty if there is more work than was allowed, and `work` a part of it


class _Judged(NamedTuple):
    pool_bytes: int  # -1 if over the limit
    match_range: int
    limit: int


class Prices:
    """What the schedules of trees cost.

    What is known already is not worked out again: a sixth of the trees that annealing comes to were
    there before, and another quarter have a schedule that was. Threads may share it.

    Parameters
    ----------
    b : Blueprint
    """

    def __init__(self, b: Blueprint) -> None:
        self.blueprint = b
        self.one_pass = max(1.0, float(b.steps.work.sum()))
        self._unrolled: dict[bytes, _Unrolled] = {}
        self._judged: dict[tuple[bytes, bytes], _Judged] = {}

    def __call__(
        self,
        tree: np.ndarray,
        most_work: float,
        limit: int = ENDLESS,
        ranges: np.ndarray = MATCH_RANGES,
    ) -> Cost:
        """What the schedule of a tree costs.

        Parameters
        ----------
        tree : np.ndarray of int32, (nodes, 2)
        most_work : float
        limit : int
            Bytes.
        ranges : np.ndarray
            The match ranges to try.
        """
        key = _digest(tree)
        unrolled, events = self._unrolled.get(key), None
        if unrolled is None or not unrolled.events and unrolled.work <= most_work:
            events, work = self._unroll(tree, most_work)
            unrolled = _Unrolled(work, b"" if events is None else _digest(events))
            self._unrolled[key] = unrolled
        if not unrolled.events or unrolled.work > most_work:
            return Cost(-1, unrolled.work, 0)
        which = unrolled.events, ranges.tobytes()
        judged = self._judged.get(which)
        if judged is None or judged.pool_bytes < 0 and judged.limit < limit:
            if events is None:
                events, _ = self._unroll(tree, most_work)
            pool, best = judge(self.blueprint, events, ranges, int(limit))
            judged = self._judged[which] = _Judged(int(pool), int(best), int(limit))
        if judged.pool_bytes > limit:
            return Cost(-1, unrolled.work, 0)
        return Cost(judged.pool_bytes, unrolled.work, judged.match_range)

    def _unroll(self, tree: np.ndarray, most_work: float) -> tuple[np.ndarray | None, float]:
        """The events of a tree and their work; no events, and a part of it, if there is more."""
        most_events = FEW * (2 + most_work / self.one_pass) * len(self.blueprint.node)
        most_events = int(min(most_events, ENDLESS))
        events, work = unroll(self.blueprint, tree, most_work, most_events)
        if work > most_work:
            return None, float(work)
        return (None, math.inf) if len(events) > most_events else (events, float(work))


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()


def step(tree: np.ndarray, count: int, draw: Callable[[], float]) -> np.ndarray:
    """A tree with one change, or the tree itself where the change that was drawn cannot be made.

    Parameters
    ----------
    tree : np.ndarray of int32, (nodes, 2)
        Of a network of ``count`` operators.
    draw : callable
        Gives random numbers from 0 to 1.
    """
    q = int(draw() * len(tree))
    lo, hi, right, end = part_of(tree, q, count)
    kind = draw()
    cut = int(tree[q, 0])
    if cut == LEAF:
        if hi - lo < 2 or kind >= 0.5:
            return tree
        new = (lo + 1 + int(draw() * (hi - lo - 1)), max(0, int(draw() * 6) - 2))
        return _spliced(tree, q, q + 1, np.array([new, (LEAF, 0), (LEAF, 0)], dtype=np.int32))
    if kind < 0.55:
        far = 1 + int(draw() * (12 if draw() < 0.33 else 3))
        cut += far if draw() < 0.5 else -far
        return _changed(tree, q, 0, cut) if lo < cut < hi else tree
    if kind < 0.62:
        if hi - lo < 2:
            return tree
        return _changed(tree, q, 0, lo + 1 + int(draw() * (hi - lo - 1)))
    if kind < 0.72:
        flag = ALIVE + int(draw() * (NOTHING + 1 - ALIVE))
        tree = _changed(tree, q, 1, flag)
        return _spliced(tree, q + 1, right, LEAF_NODE) if flag == ALL else tree
    if kind < 0.8:
        return _spliced(tree, q, end, LEAF_NODE)
    if kind < 0.88:
        return _spliced(tree, q, end, tree[right:end])
    return _spliced(tree, q, end, tree[q + 1 : right])


def _changed(tree: np.ndarray, q: int, column: int, value: int) -> np.ndarray:
    tree = tree.copy()
    tree[q, column] = value
    return tree


def _spliced(tree: np.ndarray, start: int, stop: int, middle: np.ndarray) -> np.ndarray:
    """A tree with the nodes from start to stop replaced."""
    return np.concatenate((tree[:start], middle, tree[stop:]))


def climb(
    price: Prices,
    tree: np.ndarray,
    most_work: float,
    budget: int,
    seed: int,
    tries: int,
    hot: float,
    cold: float,
    tick: Callable[[], bool],
    met: Callable[[Annealed], None] | None = None,
) -> Annealed:
    """Anneal a tree.

    Parameters
    ----------
    price : Prices
    tree : np.ndarray of int32, (nodes, 2)
        One that is allowed.
    most_work : float
        No schedule may take more.
    budget : int
        Bytes that no schedule may take more of; the aim is then the least work. 0: the aim is the
        least memory.
    seed, tries : int
    hot, cold : float
        Temperatures at the beginning and at the end, as shares of the cost.
    tick : callable
        Called before each try; the search ends when it is false.
    met : callable, optional
        Is told each tree that the search goes to, with a bound on its memory.
    """
    draw = random.Random(seed).random  # the same numbers in every version of Python
    count = len(price.blueprint.node)
    found = price(tree, most_work, budget or ENDLESS)
    best = Annealed(tree, found.pool_bytes, found.work)

    def cost(pool_bytes: int, work: float) -> tuple[float, float]:
        return (work, pool_bytes) if budget else (pool_bytes, work)

    current = lowest = cost(found.pool_bytes, found.work)[0]
    one = MATCH_RANGES[found.match_range : found.match_range + 1]
    for k in range(tries):
        if not tick():
            break
        new = step(tree, count, draw)
        while draw() < AGAIN:
            new = step(new, count, draw)
        if new is tree:
            continue
        heat = hot * (cold / hot) ** (k / tries) * lowest
        most = current - heat * math.log(1 - draw())  # Metropolis
        within = min(most_work, most) if budget else most_work
        limit = budget or int(most)
        ranges = MATCH_RANGES if k % SELDOM == 0 else one
        found = price(new, within, limit, ranges)
        if found.pool_bytes < 0:
            continue
        better = cost(found.pool_bytes, found.work) < cost(best.pool_bytes, best.work)
        if better and ranges is one:
            found = price(new, most_work)
        if better or ranges is not one:
            one = MATCH_RANGES[found.match_range : found.match_range + 1]
        tree, current = new, cost(found.pool_bytes, found.work)[0]
        if met is not None:
            met(Annealed(new, found.pool_bytes, found.work))
        if better:
            best = Annealed(new, found.pool_bytes, found.work)
            lowest = min(lowest, current)
    return best
