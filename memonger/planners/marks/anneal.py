"""Simulated annealing of recomputation masks, compiled.

A plan is evaluated as the rules leave it, replayed to the byte. Steps that raise its energy are
taken with a probability that falls as the search cools (Kirkpatrick et al. 1983, "Optimization by
Simulated Annealing"). The same seed gives the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.costs.fusion import plan_bytes
from memonger.costs.replay import NO_LIMIT
from memonger.planners.annealing import MORE, acceptable
from memonger.planners.marks.rules import RuleTables, obey
from memonger.support.compiled import compiled


class Space(NamedTuple):
    """What is searched: the masks of the nodes of a network with saved identities."""

    rules: RuleTables
    match_ranges: np.ndarray
    after: np.ndarray  # of each cut the node before it; alive there are the nodes
    keep_start: np.ndarray  # keep[keep_start[k] : keep_start[k + 1]]
    keep: np.ndarray
    flippable: np.ndarray  # nodes that may change by themselves
    seconds: np.ndarray  # of each node, when it is recomputed
    costly: np.ndarray  # of each node whether that is much for its bytes
    copied: np.ndarray  # the nodes that have a saved identity
    copies: np.ndarray  # those identities
    copy_seconds: np.ndarray  # of each, where it is saved and the node is recomputed


class Goal(NamedTuple):
    """The energy of a plan: its bytes above ``limit`` and its seconds, each times a price."""

    limit: float
    byte_price: float
    second_price: float
    flipping: float  # the share of the changes that set single nodes


class Archive(NamedTuple):
    """The fastest plan of each size; of n, plan k needs at most k + 1 n-ths of ``most`` bytes."""

    most: int
    pools: np.ndarray
    seconds: np.ndarray
    masks: np.ndarray


def empty_archive(most: int, bins: int, nodes: int) -> Archive:
    """Make an archive for plans of at most so many bytes."""
    pools, masks = np.zeros(bins, dtype=np.int64), np.zeros((bins, nodes), dtype=np.bool_)
    return Archive(most, pools, np.full(bins, np.inf), masks)


@compiled
def record(archive, pool, seconds, mask):  # type: ignore[no-untyped-def]
    """Take a plan into the archive if it is the fastest of its size."""
    if pool > archive.most:
        return
    k = max(0, (pool * len(archive.seconds) - 1) // archive.most)
    if seconds < archive.seconds[k] or (seconds == archive.seconds[k] and pool < archive.pools[k]):
        archive.pools[k] = pool
        archive.seconds[k] = seconds
        archive.masks[k] = mask


@compiled
def _ruled(s, mask):  # type: ignore[no-untyped-def]
    """Leave of a mask what the rules allow; as ``obey``, and the seconds that the plan adds."""
    n = mask.shape[0]
    for k in range(len(s.copied)):
        if not mask[s.copied[k]]:  # an identity of what is saved itself costs nothing
            mask[s.copied[k] + 1 : s.copies[k] + 1] = True
    order, reads = obey(s.rules, mask)
    seconds = 0.0
    for row in order:
        if n <= row < 2 * n:
            seconds += s.seconds[row - n]
    for k in range(len(s.copied)):
        if mask[s.copied[k]] and not mask[s.copies[k]]:
            seconds += s.copy_seconds[k]
    return order, reads, seconds


@compiled
def evaluate(s, mask):  # type: ignore[no-untyped-def]
    """Leave of a mask what the rules allow; the bytes that it costs, and the seconds it adds."""
    order, reads, seconds = _ruled(s, mask)
    t, f = s.rules.tables, s.rules.fusible
    return plan_bytes(t, f, mask, order, reads, s.match_ranges, NO_LIMIT), seconds


@compiled
def _near():  # type: ignore[no-untyped-def]
    """A distance other than 0, mostly small (Cauchy)."""
    way = int(round(np.tan(np.pi * (np.random.random() - 0.5)) * 3))
    if way == 0:
        way = 1 if np.random.random() < 0.5 else -1
    return way


@compiled
def _set_cut(s, mask, cut, value):  # type: ignore[no-untyped-def]
    """Set what is alive at a cut; there is none at -1, nor beyond the last."""
    if 0 <= cut < len(s.after):
        for q in range(s.keep_start[cut], s.keep_start[cut + 1]):
            mask[s.keep[q]] = value


@compiled
def _change(s, mask, flipping):  # type: ignore[no-untyped-def]
    """Change a mask at random."""
    cuts, kind = len(s.after), np.random.random()
    if len(s.flippable) and (not cuts or np.random.random() < flipping):
        # Set some nodes that follow each other.
        first = last = np.random.randint(len(s.flippable))
        while last + 1 < len(s.flippable) and np.random.random() < 0.8:
            last += 1
        for i in s.flippable[first : last + 1]:
            mask[i] = kind < 0.5
    elif kind < 0.6:
        # Set what is between two cuts.
        first = np.random.randint(cuts + 1) - 1
        last = min(cuts, first + abs(_near()))
        start = s.after[first] + 1 if first >= 0 else 0
        stop = s.after[last] + 1 if last < cuts else len(mask)
        mask[start:stop] = kind < 0.2
        if kind > 0.4:
            mask[start:stop] = ~s.costly[start:stop]
        _set_cut(s, mask, first, False)
        _set_cut(s, mask, last, False)
    elif kind < 0.72:
        _set_cut(s, mask, np.random.randint(cuts), False)
    else:
        # Move a cut where all is saved, or leave it out.
        cut = np.random.randint(cuts)
        while cut + 1 < cuts and mask[s.keep[s.keep_start[cut] : s.keep_start[cut + 1]]].any():
            cut += 1
        _set_cut(s, mask, cut, True)
        if kind < 0.9:
            _set_cut(s, mask, min(cuts - 1, max(0, cut + _near())), False)


@compiled
def anneal(s, mask, goal, seed, tries, hot, cold, archive, stop, done):  # type: ignore[no-untyped-def]
    """Anneal a mask in place, to that of least energy that was visited; return the energy.

    ``hot`` and ``cold`` are the temperatures at the beginning and at the end, in units of the
    energy. The archive receives what is visited. The search ends when the element of ``stop``,
    which another thread may set, is not 0; that of ``done`` counts the tries.
    """
    np.random.seed(seed)
    t, f = s.rules.tables, s.rules.fusible
    if len(s.after) + len(s.flippable) == 0:
        tries = 0
    new, best = mask.copy(), mask.copy()
    least = current = most = np.inf
    for step in range(-1, tries):  # the first is the plan as it is
        new[:] = mask
        if step >= 0:
            if stop[0]:
                break
            done[0] += 1
            _change(s, new, goal.flipping)
            while np.random.random() < MORE:
                _change(s, new, goal.flipping)
            most = acceptable(current, hot, cold, step / tries, np.random.random())
        order, reads, seconds = _ruled(s, new)
        left = most - goal.second_price * seconds
        if left < 0:
            continue
        limit = goal.limit + left / goal.byte_price
        pool = plan_bytes(t, f, new, order, reads, s.match_ranges, limit)
        if pool > limit:
            continue
        current = goal.second_price * seconds + goal.byte_price * max(0.0, pool - goal.limit)
        mask[:] = new
        record(archive, pool, seconds, mask)
        if current < least:
            least = current
            best[:] = mask
    mask[:] = best
    return least
