"""Simulated annealing of recomputation masks, compiled.

A plan is evaluated as the rules leave it, replayed to the byte. Steps that raise its energy are
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

ALL, CHEAP, NONE = 0, 1, 2  # of what stands between two cuts: what is recomputed
SAVED, RECOMPUTED = 1, 2  # of a single node; 0: as the cuts say


class Space(NamedTuple):
    """What is searched.

    A state is an array of int8. Of n cuts the first n elements tell which are made, the next n + 1
    what is recomputed before each of them and behind the last (ALL, CHEAP, NONE), the others which
    nodes are SAVED or RECOMPUTED all the same. Behind the last cut that is made nothing is
    recomputed.

    Cut k lies after node ``after[k]`` and saves the nodes ``keep[keep_start[k] :
    keep_start[k + 1]]``; the nodes ``flippable`` may change by themselves. Node i takes
    ``seconds[i]`` when it is recomputed, and much of it for its bytes if it is ``costly``. Saved
    identity ``copies[k]`` of node ``copied[k]`` adds ``copy_seconds[k]`` to a step where the one is
    recomputed and the other is not.
    """

    rules: RuleTables
    match_ranges: np.ndarray
    after: np.ndarray
    keep_start: np.ndarray
    keep: np.ndarray
    flippable: np.ndarray
    seconds: np.ndarray
    costly: np.ndarray
    copied: np.ndarray
    copies: np.ndarray
    copy_seconds: np.ndarray


class Goal(NamedTuple):
    """What annealing looks for, and how.

    The energy of a plan is its bytes above ``limit`` and its seconds, each times a price. Of the
    changes ``flipping`` flip operators and ``stretching`` set what is between two cuts; the others
    move cuts.
    """

    limit: float
    byte_price: float
    second_price: float
    flipping: float
    stretching: float


class Archive(NamedTuple):
    """The fastest plan of each size; of n, plan k needs at most k + 1 n-ths of ``most`` bytes."""

    most: int
    pools: np.ndarray
    seconds: np.ndarray
    states: np.ndarray


def empty_archive(most: int, bins: int, elements: int) -> Archive:
    """Make an archive for plans of at most so many bytes."""
    return Archive(
        most,
        np.zeros(bins, dtype=np.int64),
        np.full(bins, np.inf),
        np.zeros((bins, elements), dtype=np.int8),
    )


@compiled
def record(archive, pool, seconds, state):  # type: ignore[no-untyped-def]
    """Take a plan into the archive if it is the fastest of its size."""
    if pool > archive.most:
        return
    k = max(0, (pool * len(archive.seconds) - 1) // archive.most)
    if seconds < archive.seconds[k] or (seconds == archive.seconds[k] and pool < archive.pools[k]):
        archive.pools[k] = pool
        archive.seconds[k] = seconds
        archive.states[k] = state


@compiled
def added_seconds(s, mask, order):  # type: ignore[no-untyped-def]
    """The seconds that a plan adds to a step that runs in this order."""
    n = mask.shape[0]
    seconds = 0.0
    for row in order:
        if n <= row < 2 * n:
            seconds += s.seconds[row - n]
    for k in range(s.copied.shape[0]):
        if mask[s.copied[k]] and not mask[s.copies[k]]:
            seconds += s.copy_seconds[k]
    return seconds


@compiled
def plan_of(s, state, mask):  # type: ignore[no-untyped-def]
    """Write the nodes that a state recomputes to ``mask``, and obey the rules; as ``obey``."""
    cuts = len(s.after)
    made = np.flatnonzero(state[:cuts])
    mask[:] = False
    start, last = 0, made[-1] if len(made) else cuts
    for k in range(last + 1):
        stop = s.after[k] + 1 if k < cuts else len(mask)
        if state[cuts + k] == ALL:
            mask[start:stop] = True
        elif state[cuts + k] == CHEAP:
            mask[start:stop] = ~s.costly[start:stop]
        start = stop
    for k in made:
        for q in range(s.keep_start[k], s.keep_start[k + 1]):
            mask[s.keep[q]] = False
    nodes = state[2 * cuts + 1 :]
    for i in range(len(nodes)):
        if nodes[i]:
            mask[i] = nodes[i] == RECOMPUTED
    for k in range(len(s.copied)):
        if not mask[s.copied[k]]:  # an identity of what is saved itself costs nothing
            mask[s.copied[k] + 1 : s.copies[k] + 1] = True
    return obey(s.rules, mask)


@compiled
def evaluate(s, state, mask):  # type: ignore[no-untyped-def]
    """The bytes that a state costs, and the seconds that it adds; ``mask``: its plan."""
    order, reads = plan_of(s, state, mask)
    t, f = s.rules.tables, s.rules.fusible
    pool = plan_bytes(t, f, mask, order, reads, s.match_ranges, NO_LIMIT)
    return pool, added_seconds(s, mask, order)


@compiled
def _near():  # type: ignore[no-untyped-def]
    """A distance other than 0, mostly small (Cauchy)."""
    way = int(round(np.tan(np.pi * (np.random.random() - 0.5)) * 3))
    if way == 0:
        way = 1 if np.random.random() < 0.5 else -1
    return way


@compiled
def _change(s, state, flipping, stretching):  # type: ignore[no-untyped-def]
    """Flip operators that follow each other, set what is between two cuts, or move a cut."""
    n, kind = len(s.after), np.random.random()
    if len(s.flippable) and (kind < flipping or not n):
        first = last = np.random.randint(len(s.flippable))
        while last + 1 < len(s.flippable) and np.random.random() < 0.8:
            last += 1
        to = np.random.randint(3)
        for i in s.flippable[first : last + 1]:
            state[2 * n + 1 + i] = to
    elif kind < flipping + stretching:
        first = np.random.randint(n + 1) - 1
        last = min(n, first + abs(_near()))
        state[n + first + 1 : n + last + 1] = np.random.randint(3)
        state[first + 1 : last] = False
        if first >= 0:
            state[first] = True
        if last < n:
            state[last] = True
    else:
        made, move = np.flatnonzero(state[:n]), np.random.random()
        k = made[np.random.randint(len(made))] if len(made) else 0
        if move < 0.6 and len(made):
            state[k] = False
            state[min(n - 1, max(0, k + _near()))] = True
        elif move < 0.8 and len(made) > 1:
            state[k] = False
        else:
            state[np.random.randint(n)] = True


@compiled
def anneal(s, state, goal, seed, tries, hot, cold, archive, stop, done):  # type: ignore[no-untyped-def]
    """Anneal a state in place, to the one of least energy that was visited.

    Parameters
    ----------
    s : Space
    state : np.ndarray of int8
    goal : Goal
    seed, tries : int
    hot, cold : float
        Temperatures at the beginning and at the end, in units of the energy.
    archive : Archive
        Receives what is visited.
    stop : np.ndarray
        The search ends when its element is not 0; another thread may set it.
    done : np.ndarray
        Its element counts the tries.

    Returns
    -------
    float
        The least energy.
    """
    np.random.seed(seed)
    t, f = s.rules.tables, s.rules.fusible
    if len(s.after) + len(s.flippable) == 0:
        tries = 0
    new, least_state = state.copy(), state.copy()
    mask = np.empty(t.forward, dtype=np.bool_)
    least = current = most = np.inf
    for step in range(-1, tries):  # the first is the plan as it is
        new[:] = state
        if step >= 0:
            if stop[0]:
                break
            done[0] += 1
            _change(s, new, goal.flipping, goal.stretching)
            while np.random.random() < 0.3:
                _change(s, new, goal.flipping, goal.stretching)
            heat = hot * (cold / hot) ** (step / tries)
            most = current - heat * np.log(1 - np.random.random())  # Metropolis
        order, reads = plan_of(s, new, mask)
        seconds = added_seconds(s, mask, order)
        left = most - goal.second_price * seconds
        if left < 0:
            continue
        limit = goal.limit + left / goal.byte_price
        pool = plan_bytes(t, f, mask, order, reads, s.match_ranges, limit)
        if pool > limit:
            continue
        current = goal.second_price * seconds + goal.byte_price * max(0.0, pool - goal.limit)
        state[:] = new
        record(archive, pool, seconds, state)
        if current < least:
            least = current
            least_state[:] = state
    state[:] = least_state
    return least
