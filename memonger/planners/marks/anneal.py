"""Compiled search for plans: sets of cuts, and single operators flipped, annealed on the replay.

A state is a set of cuts (what is alive at a cut is kept, all between is recomputed, what comes
after the last cut is not) and flips: operators that are kept or recomputed against it. Its cost is
that of the plan that the rules leave of it, replayed to the byte. Steps that raise the cost are
taken with a probability that falls as the search cools (Kirkpatrick et al. 1983, "Optimization by
Simulated Annealing"). The same seed gives the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.costs.allocator import NO_LIMIT
from memonger.costs.fusion import plan_bytes
from memonger.planners.marks.rules import RuleTables, obey
from memonger.support.compiled import compiled

KEEP, RECOMPUTE = 1, 2  # flips; 0: as the cuts say


class Space(NamedTuple):
    """What is searched.

    Attributes
    ----------
    rules : RuleTables
    match_ranges : np.ndarray
        The factors that MXNet's planner will try (``allocator.match_ranges``).
    base : np.ndarray of bool
        What is recomputed where there is no cut.
    after, keep_start, keep : np.ndarray
        For each cut the node after which it lies, and the nodes that it keeps.
    flippable : np.ndarray
        The nodes that may be flipped.
    """

    rules: RuleTables
    match_ranges: np.ndarray
    base: np.ndarray
    after: np.ndarray
    keep_start: np.ndarray
    keep: np.ndarray
    flippable: np.ndarray


@compiled
def fill(s, cuts, flips, mask):  # type: ignore[no-untyped-def]
    """Write the nodes that a state recomputes to ``mask``, and obey the rules; as ``obey``."""
    mask[:] = s.base
    for k in np.flatnonzero(cuts)[::-1][:1]:
        mask[s.after[k] + 1 :] = False
    for k in np.flatnonzero(cuts):
        for q in range(s.keep_start[k], s.keep_start[k + 1]):
            mask[s.keep[q]] = False
    for i in s.flippable:
        if flips[i] != 0:
            mask[i] = flips[i] == RECOMPUTE
    return obey(s.rules, mask)


@compiled
def price(s, cuts, flips, mask, limit):  # type: ignore[no-untyped-def]
    """The bytes that a state costs, or some that are more than ``limit``; ``mask``: its plan."""
    order, reads = fill(s, cuts, flips, mask)
    return plan_bytes(s.rules.tables, s.rules.fusible, mask, order, reads, s.match_ranges, limit)


@compiled
def _move_cut(cuts):  # type: ignore[no-untyped-def]
    """Move, leave out or put in a cut."""
    chosen = np.flatnonzero(cuts)
    kind = np.random.random()
    if kind < 0.6 and len(chosen):
        k = chosen[np.random.randint(len(chosen))]
        way = int(round(np.tan(np.pi * (np.random.random() - 0.5)) * 3))  # mostly near (Cauchy)
        if way == 0:
            way = 1 if np.random.random() < 0.5 else -1
        cuts[k] = False
        cuts[min(len(cuts) - 1, max(0, k + way))] = True
    elif kind < 0.8 and len(chosen) > 1:
        cuts[chosen[np.random.randint(len(chosen))]] = False
    else:
        cuts[np.random.randint(len(cuts))] = True


@compiled
def _flip_run(flippable, flips):  # type: ignore[no-untyped-def]
    """Flip some operators that follow each other to one state."""
    first = np.random.randint(len(flippable))
    last = first
    while last + 1 < len(flippable) and np.random.random() < 0.8:
        last += 1
    state = np.random.randint(3)
    for i in flippable[first : last + 1]:
        flips[i] = state


@compiled
def anneal(s, cuts, flips, seed, tries, hot, cold, flipping, stop, done):  # type: ignore[no-untyped-def]
    """Anneal a state in place, to the best that was met.

    Parameters
    ----------
    s : Space
    cuts : np.ndarray of bool
        The cuts of ``s`` that are made.
    flips : np.ndarray of int8
        For each node 0, KEEP or RECOMPUTE.
    seed, tries : int
    hot, cold : float
        Temperatures at the beginning and at the end, as shares of the cost.
    flipping : float
        The share of steps that flip an operator instead of moving a cut.
    stop : np.ndarray
        The search ends when its element is not 0; another thread may set it.
    done : np.ndarray
        Its element counts the tries.

    Returns
    -------
    int
        The bytes that the best state costs.
    """
    np.random.seed(seed)
    mask = np.empty(s.base.shape[0], dtype=np.bool_)
    current = best = price(s, cuts, flips, mask, NO_LIMIT)
    best_cuts, best_flips = cuts.copy(), flips.copy()
    new_cuts, new_flips = cuts.copy(), flips.copy()
    if len(s.flippable) == 0:
        flipping = 0.0
    if len(cuts) == 0:
        flipping = 1.0
    for step in range(tries):
        if stop[0] or len(cuts) + len(s.flippable) == 0:
            break
        new_cuts[:] = cuts
        new_flips[:] = flips
        while True:
            if np.random.random() < flipping:
                _flip_run(s.flippable, new_flips)
            else:
                _move_cut(new_cuts)
            if np.random.random() >= 0.3:
                break
        heat = hot * (cold / hot) ** (step / tries) * best
        limit = current - heat * np.log(1 - np.random.random())  # Metropolis
        cost = price(s, new_cuts, new_flips, mask, limit)
        done[0] += 1
        if cost <= limit:
            current = cost
            cuts[:] = new_cuts
            flips[:] = new_flips
            if cost < best:
                best = cost
                best_cuts[:] = cuts
                best_flips[:] = flips
    cuts[:] = best_cuts
    flips[:] = best_flips
    return best


@compiled
def cheapest_cuts(weights, limit):  # type: ignore[no-untyped-def]
    """The cuts that keep least while no piece needs more than ``limit`` besides what was kept.

    Returns
    -------
    np.ndarray of int
        Indices of cuts in ascending order; none if there are no such cuts.
    bool
        Whether there are.
    """
    count = len(weights.keep)
    kept = np.full(count, np.inf)  # at the least, if there is a cut here
    kept[0] = 0
    before = np.zeros(count, dtype=np.int64)
    for j in range(1, count):
        highest = 0.0
        for i in range(j - 1, -1, -1):
            highest = max(highest, weights.highest[i + 1])
            piece = highest - weights.until[i]
            if piece > limit:
                break
            if kept[i] + piece <= limit and kept[i] + weights.keep[j] < kept[j]:
                kept[j] = kept[i] + weights.keep[j]
                before[j] = i
    chosen = np.zeros(count, dtype=np.bool_)
    at = before[count - 1]
    while at > 0:
        chosen[at - 1] = True
        at = before[at]
    return np.flatnonzero(chosen), np.isfinite(kept[count - 1])
