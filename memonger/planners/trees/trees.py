"""Recursive checkpointing trees, and the schedules that they stand for.

A node of a tree stands for a segment of the network, the operators at positions lo..hi-1 of the
execution order, whose gradients are to be computed while what they need of earlier operators is
saved. It says where the segment is cut: run forward to the cut, process the right part, then the
left one. Its flag tells what of the left part is saved meanwhile. A leaf runs what its gradients
read and is still missing, then the gradients. Everything that runs is read: by the gradients of the
segment, by operators on the way to them, or as an output of the network.

A tree is an array of int32, (nodes, 2): cuts (positions, or `LEAF`) and flags in preorder, the left
part before the right one.
"""

from __future__ import annotations

import functools
from math import comb
from typing import NamedTuple

import numpy as np

from memonger.support.compiled import compiled
from memonger.support.errors import MemongerError

LEAF = -1  # instead of a cut: the segment is not divided
LEAF_NODE = np.array([[LEAF, 0]], dtype=np.int32)

#: What is saved of the left part while the right one is processed, besides what the right one
#: reads: what is alive at the cut and the left part's gradients read, all that they read, the
#: results of costly operators, or nothing.
ALIVE, ALL, COSTLY, NOTHING = 0, 1, 2, 3

MOST_NODES = 2  # that a tree may grow to, for each operator

FREE, HELD, PINNED = 0, 1, 2  # pinned: it never runs again


class Steps(NamedTuple):
    """The forward operators of a network by position, for compiled code."""

    read_start: np.ndarray
    read: np.ndarray  # positions that each operator reads, from read_start[position] on
    want_start: np.ndarray
    want: np.ndarray  # positions that its gradient reads
    last: np.ndarray  # its last reader (-1: none)
    first_want: np.ndarray  # the first operator whose gradient reads it (their number: none)
    heads: np.ndarray  # the operators of which the network returns a result
    pinned: np.ndarray  # whether it is one of those, or not recomputable
    gradient: np.ndarray  # whether its gradient runs
    costly: np.ndarray
    work: np.ndarray  # what running it forward costs


# ---------------------------------------------------------------- the schedule of a tree


@compiled
def _ends(tree):  # type: ignore[no-untyped-def]
    """Find where the subtree of each node ends."""
    count = tree.shape[0]
    end = np.empty(count, dtype=np.int32)
    for q in range(count - 1, -1, -1):
        end[q] = q + 1 if tree[q, 0] == LEAF else end[end[q + 1]]
    return end


@compiled
def _segment(tree, q, count):  # type: ignore[no-untyped-def]
    """Find the segment lo, hi of node q in a network of ``count`` operators.

    Then where the subtree of its right child starts (0 for a leaf), and where its own ends.
    """
    end = _ends(tree)
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
def _ask_for_heads(s, lo, hi, held, asked, mark):  # type: ignore[no-untyped-def]
    """Mark the outputs of the network that have not run (those that have are PINNED); the first."""
    first = hi
    for i in s.heads:
        if lo <= i < hi and held[i] == FREE:
            asked[i] = max(asked[i], mark + i)
            first = min(first, i)
    return first


@compiled
def _ask(s, lo, hi, held, asked, mark):  # type: ignore[no-untyped-def]
    """Mark what the gradients and outputs of a segment need, directly or to be computed.

    A mark is ``mark`` plus the last operator that asks. Those before it are less, by more than the
    number of operators.
    """
    _ask_for_heads(s, lo, hi, held, asked, mark)
    for i in range(hi - 1, lo - 1, -1):
        if s.gradient[i]:
            for q in range(s.want_start[i], s.want_start[i + 1]):
                asked[s.want[q]] = max(asked[s.want[q]], mark + i)
        if asked[i] >= mark and held[i] == FREE:
            for q in range(s.read_start[i], s.read_start[i + 1]):
                asked[s.read[q]] = max(asked[s.read[q]], mark + i)


@compiled
def _run(s, lo, hi, held, asked, mark, operations, count):  # type: ignore[no-untyped-def]
    """Run what is marked and not held."""
    work = 0.0
    for i in range(lo, hi):
        if held[i] == FREE and asked[i] >= mark:
            operations[count] = i
            count += 1
            held[i] = PINNED if s.pinned[i] else HELD
            work += s.work[i]
    return count, work


@compiled
def unroll(b, tree, most_work, most_operations):  # type: ignore[no-untyped-def]
    """Make the schedule of a tree, and tell the work of all its forward runs.

    A position: the operator runs; -1 - position: its gradient does. Each reads what ran last of
    what it reads. Cuts outside of their segment are passed over. It ends early, with a part of the
    operations, once there is more than ``most_work``, or more than ``most_operations``.
    """
    s = b.steps
    n = s.last.shape[0]
    end = _ends(tree)
    held = np.zeros(n, dtype=np.int8)
    needed = np.zeros(n, dtype=np.int64)  # by the gradients of what is right of a cut
    asked = np.zeros(n, dtype=np.int64)
    alive = np.zeros(n, dtype=np.int64)  # at a cut, to be held
    pending = np.empty((tree.shape[0] + 1, 3), dtype=np.int32)
    pending[0, 0], pending[0, 1], pending[0, 2] = 0, 0, n
    depth = 1
    mark = 0
    operations = np.empty(4 * n + 16, dtype=np.int32)
    count = 0
    work = 0.0
    while depth and work <= most_work and count <= most_operations:
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
                _ask(s, cut, hi, held, needed, right)
            if count + 2 * (hi - lo) > len(operations):
                longer = np.empty(2 * len(operations) + 2 * (hi - lo), dtype=np.int32)
                longer[:count] = operations[:count]
                operations = longer
            if leaf:
                break
            if flag == ALL or flag == COSTLY:
                _ask(s, lo, hi, held, asked, mark)
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
            count, more = _run(s, first, cut, held, asked, mark, operations, count)
            work += more
            for k in range(before, count):
                i = operations[k]
                if held[i] == HELD and alive[i] != mark:
                    held[i] = FREE
            pending[depth, 0], pending[depth, 1], pending[depth, 2] = q + 1, lo, cut
            depth += 1
            q, lo = end[q + 1], cut
            if work > most_work or count > most_operations:
                break
        if leaf:
            count, more = _run(s, lo, hi, held, needed, right, operations, count)
            work += more
            for i in range(hi - 1, lo - 1, -1):
                if s.gradient[i]:
                    operations[count] = -1 - i
                    count += 1
    return operations[:count], work


# ---------------------------------------------------------------- binomial trees


def fewest_states(steps: int, repeats: int) -> int:
    """Tell how many states must be saved so that no step runs more often than ``repeats`` times."""
    states = 1
    while _reach(states, repeats) < steps:
        states += 1
    return states


def binomial_tree(steps: int, states: int) -> np.ndarray:
    """Make the binomial schedule of a chain of equal steps: the one with the fewest forward steps.

    Also known as treeverse (Griewank 1992) and Revolve (Griewank and Walther 2000, ACM TOMS 26(1),
    algorithm 799). To reverse steps lo..hi-1 with s states saved, the one at lo among them: run
    forward to a cut, reverse what is right of it with s - 1 states, then what is left of it with s.
    It is optimal if all steps cost the same and all states are equally large.
    """
    if steps < 1 or states < 1:
        raise MemongerError(
            f"a chain of {steps} steps with {states} states kept cannot be reversed; both must be "
            "1 or more"
        )
    tree: list[tuple[int, int]] = []
    pending = [(0, steps, states)]
    while pending:
        lo, hi, saved = pending.pop()
        if hi - lo == 1:
            tree.append((LEAF, 0))
            continue
        cut = lo + _first_part(hi - lo, saved)
        tree.append((cut, 0))
        pending += [(cut, hi, saved - 1), (lo, cut, saved)]
    return np.array(tree, dtype=np.int32)


def _reach(states: int, repeats: int) -> int:
    """Tell how many steps can be reversed if none runs more often than ``repeats`` times."""
    return comb(states + repeats, states) if repeats >= 0 else 0


@functools.lru_cache(maxsize=2**16)
def _first_part(steps: int, states: int) -> int:
    """Tell the fewest steps left of the first cut of an optimal schedule (equation 5)."""
    repeats = 0
    while _reach(states, repeats) < steps:
        repeats += 1
    return max(1, _reach(states, repeats - 2), steps - _reach(states - 1, repeats))


# ---------------------------------------------------------------- other trees


def tree_of_marks(s: Steps, kept: np.ndarray) -> np.ndarray:
    """Make a tree that saves about these operators: one level of segments, as a set of marks has.

    It is cut where all that is alive is saved. Segments of which everything, or all that is costly,
    is saved are held so.
    """
    count = len(s.last)
    place = np.arange(count)
    gone = np.bincount(place[~kept] + 1, minlength=count + 2)
    gone -= np.bincount(np.maximum(s.last, place)[~kept] + 1, minlength=count + 2)
    dropped = np.cumsum(np.append(0, ~kept))
    costly = np.cumsum(np.append(0, ~kept & s.costly))
    cuts = [0]
    flags: list[int] = []
    for cut in (np.flatnonzero(np.cumsum(gone)[1:count] == 0) + 1).tolist():
        lo = cuts[-1]
        if dropped[cut] > dropped[lo]:
            flags.append(COSTLY if costly[cut] == costly[lo] else ALIVE)
        elif flags and flags[-1] == ALL:  # one segment with that before it
            cuts.pop()
        else:
            flags.append(ALL)
        cuts.append(cut)
    tree = [node for cut, flag in zip(cuts[1:], flags) for node in ((cut, flag), (LEAF, 0))]
    return np.array([*tree, (LEAF, 0)], dtype=np.int32)


@compiled
def change(tree, count):  # type: ignore[no-untyped-def]
    """Change a tree at random: move, add or drop a cut, or change what is saved of its left part.

    The tree of a network of ``count`` operators comes back itself where the change that was drawn
    cannot be made.
    """
    q = np.random.randint(len(tree))
    lo, hi, right, end = _segment(tree, q, count)
    kind = np.random.random()
    cut = tree[q, 0]
    if cut == LEAF:
        if hi - lo < 2 or kind >= 0.5 or len(tree) >= MOST_NODES * count:
            return tree
        new = np.full((3, 2), LEAF, dtype=np.int32)
        new[0] = lo + 1 + np.random.randint(hi - lo - 1), max(0, np.random.randint(6) - 2)
        return _spliced(tree, q, q + 1, new)
    if kind < 0.55:
        far = 1 + np.random.randint(12 if np.random.random() < 0.33 else 3)
        cut += far if np.random.random() < 0.5 else -far
        return _changed(tree, q, 0, cut) if lo < cut < hi else tree
    if kind < 0.62:
        if hi - lo < 2:
            return tree
        return _changed(tree, q, 0, lo + 1 + np.random.randint(hi - lo - 1))
    if kind < 0.72:
        flag = ALIVE + np.random.randint(NOTHING + 1 - ALIVE)
        tree = _changed(tree, q, 1, flag)
        return _spliced(tree, q + 1, right, LEAF_NODE) if flag == ALL else tree
    if kind < 0.8:
        return _spliced(tree, q, end, LEAF_NODE)
    if kind < 0.88:
        return _spliced(tree, q, end, tree[right:end])
    return _spliced(tree, q, end, tree[q + 1 : right])


@compiled
def _changed(tree, q, column, value):  # type: ignore[no-untyped-def]
    tree = tree.copy()
    tree[q, column] = value
    return tree


@compiled
def _spliced(tree, start, stop, middle):  # type: ignore[no-untyped-def]
    """A tree with the nodes from start to stop replaced."""
    return np.concatenate((tree[:start], middle, tree[stop:]))
