"""A tree of cuts unrolled into a schedule: which operators run in which order, and how often.

A node of the tree stands for a part of the network, the operators at positions lo..hi-1 of the
execution order, whose gradients are to be computed while what they need of earlier operators is
held. It says where the part is cut: run forward to the cut, process what is right of it, then what
is left. What of the left part is held meanwhile, its flag tells. A leaf runs what its gradients
read and is still missing, then the gradients.

All that is run is run because somebody reads it: the gradients of the part, the operators on the
way to them, or the outputs of the network.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.support.compiled import compiled

LEAF = -1  # instead of a cut: the part is not divided

#: What is held of the left part while the right one is processed, besides what the right one reads:
#: what is alive at the cut and the left part's gradients read, all that they read, the results of
#: costly operators, or nothing.
ALIVE, ALL, COSTLY, NOTHING = 0, 1, 2, 3

FREE, HELD, PINNED = 0, 1, 2


class Steps(NamedTuple):
    """A network as a schedule sees it. Positions are those of the execution order.

    Attributes
    ----------
    read_start, read : np.ndarray
        For each position the operators (positions) that it reads.
    want_start, want : np.ndarray
        The operators that its gradient reads, but for results that are kept from their first run.
    last : np.ndarray
        The last operator that reads it, -1 for none.
    first_want : np.ndarray
        The first operator whose gradient reads it; their number for none.
    heads : np.ndarray
        The operators of which the network returns a result.
    head : np.ndarray of bool
        Whether it is one of them.
    once : np.ndarray of bool
        Whether it must not run twice.
    gradient : np.ndarray of bool
        Whether it has a gradient that is asked for.
    costly : np.ndarray of bool
    work : np.ndarray of float
        What running it forward costs.
    """

    read_start: np.ndarray
    read: np.ndarray
    want_start: np.ndarray
    want: np.ndarray
    last: np.ndarray
    first_want: np.ndarray
    heads: np.ndarray
    head: np.ndarray
    once: np.ndarray
    gradient: np.ndarray
    costly: np.ndarray
    work: np.ndarray


@compiled
def ends(tree):  # type: ignore[no-untyped-def]
    """For each node of a tree in preorder where its subtree ends."""
    count = tree.shape[0]
    end = np.empty(count, dtype=np.int32)
    for q in range(count - 1, -1, -1):
        end[q] = q + 1 if tree[q, 0] == LEAF else end[end[q + 1]]
    return end


@compiled
def part_of(tree, q, count):  # type: ignore[no-untyped-def]
    """What node q of a tree stands for in a network of ``count`` operators: lo, hi.

    Then where the subtree of its right child starts (0 for a leaf), and where its own ends.
    """
    end = ends(tree)
    lo, hi = 0, count
    p = 0
    while p != q:
        cut = min(max(tree[p, 0], lo), hi)
        if q < end[p + 1]:
            hi = cut
            p += 1
        else:
            lo = cut
            p = end[p + 1]
    return lo, hi, 0 if tree[q, 0] == LEAF else end[q + 1], end[q]


@compiled
def push(stack, depth, a, b, c):  # type: ignore[no-untyped-def]
    """Put three numbers on a stack; its new depth."""
    stack[depth, 0], stack[depth, 1], stack[depth, 2] = a, b, c
    return depth + 1


@compiled
def wanted(s, lo, hi, held, asked, mark):  # type: ignore[no-untyped-def]
    """Mark what the gradients of a part read, and what is needed to compute it and not held.

    A mark is ``mark`` plus the last operator that asks. Those before it are less, by more than the
    number of operators.
    """
    for i in range(hi - 1, lo - 1, -1):
        if s.gradient[i]:
            for q in range(s.want_start[i], s.want_start[i + 1]):
                asked[s.want[q]] = max(asked[s.want[q]], mark + i)
        if asked[i] >= mark and held[i] == FREE:
            for q in range(s.read_start[i], s.read_start[i + 1]):
                asked[s.read[q]] = max(asked[s.read[q]], mark + i)


@compiled
def missing(s, lo, hi, held, asked, mark):  # type: ignore[no-untyped-def]
    """Mark what the gradients and outputs of a part need, directly or to be computed."""
    _ask_for_heads(s, lo, hi, held, asked, mark)
    wanted(s, lo, hi, held, asked, mark)


@compiled
def _ask_for_heads(s, lo, hi, held, asked, mark):  # type: ignore[no-untyped-def]
    """Mark the outputs of the network that have not run (those that have are PINNED); the first."""
    first = hi
    for i in s.heads:
        if lo <= i < hi and held[i] == FREE:
            asked[i] = max(asked[i], mark + i)
            first = min(first, i)
    return first


@compiled
def _run(s, lo, hi, held, asked, mark, events, count):  # type: ignore[no-untyped-def]
    """Run what is marked and not held."""
    work = 0.0
    for i in range(lo, hi):
        if held[i] == FREE and asked[i] >= mark:
            events[count] = i
            count += 1
            held[i] = PINNED if s.head[i] or s.once[i] else HELD
            work += s.work[i]
    return count, work


@compiled
def unroll(b, tree, most_work, most_events):  # type: ignore[no-untyped-def]
    """The events of a tree's schedule.

    Parameters
    ----------
    b : Blueprint
        Its ``steps`` are read. (numba takes tuples of tuples faster than plain ones.)
    tree : np.ndarray of int32, (nodes, 2)
        Its cuts and flags in preorder; cuts outside of their part are passed over.
    most_work : float
    most_events : int
        It ends early once there are more; the events are then not all there.

    Returns
    -------
    np.ndarray of int32
        A position: the operator runs; -1 - position: its gradient does. Each reads what ran last of
        what it reads.
    float
        The work of all forward runs.
    """
    s = b.steps
    n = s.last.shape[0]
    end = ends(tree)
    held = np.zeros(n, dtype=np.int8)
    needed = np.zeros(n, dtype=np.int64)  # by the gradients of what is right of a cut
    asked = np.zeros(n, dtype=np.int64)
    alive = np.zeros(n, dtype=np.int64)  # at a cut, to be held
    pending = np.empty((tree.shape[0] + 1, 3), dtype=np.int32)
    depth = push(pending, 0, 0, 0, n)
    mark = 0
    events = np.empty(4 * n + 16, dtype=np.int32)
    count = 0
    work = 0.0
    while depth and work <= most_work and count <= most_events:
        depth -= 1
        q, lo, hi = pending[depth, 0], pending[depth, 1], pending[depth, 2]
        # From here to the right: what the gradients before hi need is marked once for all cuts, for
        # nothing right of a cut runs before that is processed.
        right = -1
        while True:
            while tree[q, 0] != LEAF and not lo < tree[q, 0] < hi:
                q = end[q + 1] if tree[q, 0] <= lo else q + 1
            leaf = tree[q, 0] == LEAF
            cut, flag = lo if leaf else tree[q, 0], tree[q, 1]
            mark += n + 1
            if right < 0:
                right = mark
                missing(s, cut, hi, held, needed, right)
            if count + 2 * (hi - lo) > len(events):
                longer = np.empty(2 * len(events) + 2 * (hi - lo), dtype=np.int32)
                longer[:count] = events[:count]
                events = longer
            if leaf:
                break
            if flag == ALL or flag == COSTLY:
                missing(s, lo, hi, held, asked, mark)
                for i in range(lo, cut):
                    if flag == COSTLY and s.costly[i] and asked[i] >= mark:
                        alive[i] = mark + n
                    if flag == ALL and s.gradient[i]:
                        for k in range(s.want_start[i], s.want_start[i + 1]):
                            j = s.want[k]
                            if j >= lo and asked[j] >= mark:
                                alive[j] = mark + n
                mark += n + 1  # what is asked for is another question
            first = _ask_for_heads(s, lo, cut, held, asked, mark)
            for i in range(lo, cut):
                crosses = s.last[i] >= cut and s.first_want[i] < cut
                if (
                    needed[i] >= right + cut
                    or (crosses and flag != NOTHING)
                    or alive[i] == mark - 1
                ):
                    alive[i] = asked[i] = mark
                    first = min(first, i)
            i = cut - 1
            while i >= first:
                if asked[i] >= mark and held[i] == FREE:
                    for k in range(s.read_start[i], s.read_start[i + 1]):
                        j = s.read[k]
                        asked[j] = mark
                        first = max(lo, min(first, j))
                i -= 1
            before = count
            count, more = _run(s, first, cut, held, asked, mark, events, count)
            work += more
            for k in range(before, count):
                i = events[k]
                if held[i] == HELD and alive[i] != mark:
                    held[i] = FREE
            depth = push(pending, depth, q + 1, lo, cut)
            q, lo = end[q + 1], cut
            if work > most_work or count > most_events:
                break
        if leaf:
            count, more = _run(s, lo, hi, held, needed, right, events, count)
            work += more
            for i in range(hi - 1, lo - 1, -1):
                if s.gradient[i]:
                    events[count] = -1 - i
                    count += 1
    return events[:count], work


def tree_keeping(s: Steps, kept: np.ndarray) -> np.ndarray:
    """A tree that keeps about these operators: one level of segments, as a set of marks has.

    It is cut where all that is alive is kept. Segments of which everything, or all that is costly,
    is kept are held so.
    """
    count = len(s.last)
    gone = np.zeros(count + 2, dtype=np.int64)  # how many results are alive there and not kept
    made = np.flatnonzero(~kept & (s.last > np.arange(count)))
    np.add.at(gone, made + 1, 1)
    np.add.at(gone, s.last[made] + 1, -1)
    again = np.concatenate([[0], np.cumsum(~kept)])
    costly = np.concatenate([[0], np.cumsum(~kept & s.costly)])
    cuts = [0]
    flags: list[int] = []
    for cut in np.flatnonzero(np.cumsum(gone)[:-1] == 0).tolist():
        if not 0 < cut < count:
            continue
        lo = cuts[-1]
        if again[cut] == again[lo]:
            if flags and flags[-1] == ALL:  # one segment with that before it
                cuts.pop()
                flags.pop()
            flags.append(ALL)
        else:
            flags.append(COSTLY if costly[cut] == costly[lo] else ALIVE)
        cuts.append(cut)
    tree = [node for cut, flag in zip(cuts[1:], flags) for node in ((cut, flag), (LEAF, 0))]
    return np.array([*tree, (LEAF, 0)], dtype=np.int32)
