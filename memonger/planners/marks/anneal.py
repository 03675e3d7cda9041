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
from memonger.planners.annealing import MORE, acceptable, record, slot_of
from memonger.planners.marks.rules import RuleArrays, obey
from memonger.support.compiled import compiled

AS_CUTS, SAVED, RECOMPUTED = 0, 1, 2  # of a node in a state


class Space(NamedTuple):
    """What is searched.

    A state is an array of int8. Of n cuts the first n elements tell which are made: what is alive
    there is saved, all between is recomputed, and nothing behind the last. The others tell which
    nodes are SAVED or RECOMPUTED all the same.
    """

    rules: RuleArrays
    match_ranges: np.ndarray
    after: np.ndarray  # of each cut the node before it
    keep_start: np.ndarray
    keep: np.ndarray  # the nodes that cut k saves, from keep_start[k] to keep_start[k + 1]
    flippable: np.ndarray  # nodes that may change by themselves
    seconds: np.ndarray  # of each node when it is recomputed
    costly: np.ndarray  # whether that is much for its bytes
    copied: np.ndarray  # nodes with saved identities
    copies: np.ndarray  # those identities
    copy_seconds: np.ndarray  # of each that is saved where its node is recomputed


class Goal(NamedTuple):
    """What annealing looks for, and how.

    The energy of a plan is its bytes above ``limit`` and its seconds, each times a price.
    """

    limit: float
    byte_price: float
    second_price: float
    flipping: float  # the share of changes that set single nodes; the others move cuts, or,
    by_node: bool  # if states name each node, set what is between two cuts and what one saves


@compiled
def added_seconds(s, mask, order):  # type: ignore[no-untyped-def]
    """The seconds that a plan adds to a step that runs in this order."""
    n = mask.shape[0]
    seconds = s.seconds[order[(order >= n) & (order < 2 * n)] - n].sum()
    for k in range(s.copied.shape[0]):
        if mask[s.copied[k]] and not mask[s.copies[k]]:
            seconds += s.copy_seconds[k]
    return seconds


@compiled
def unruled(s, state):  # type: ignore[no-untyped-def]
    """The nodes that a state would recompute if there were no rules."""
    made, nodes = np.flatnonzero(state[: len(s.after)]), state[len(s.after) :]
    mask = np.ones(len(nodes), dtype=np.bool_)
    if len(made):
        mask[s.after[made[-1]] + 1 :] = False
    for k in made:
        mask[s.keep[s.keep_start[k] : s.keep_start[k + 1]]] = False
    mask = (mask & (nodes != SAVED)) | (nodes == RECOMPUTED)
    for k in range(len(s.copied)):
        if not mask[s.copied[k]]:  # an identity of what is saved itself costs nothing
            mask[s.copied[k] + 1 : s.copies[k] + 1] = True
    return mask


@compiled
def plan_of(s, state):  # type: ignore[no-untyped-def]
    """The nodes that a state recomputes by the rules, and what ``obey`` tells of them."""
    mask = unruled(s, state)
    order, reads = obey(s.rules, mask)
    return mask, order, reads


@compiled
def named(s, mask):  # type: ignore[no-untyped-def]
    """The state that names what a plan does with each node."""
    nodes = np.where(mask, RECOMPUTED, SAVED)
    return np.concatenate((np.zeros_like(s.after), nodes)).astype(np.int8)


@compiled
def evaluate(s, state):  # type: ignore[no-untyped-def]
    """The bytes that a state costs, and the seconds that it adds."""
    mask, order, reads = plan_of(s, state)
    t, f = s.rules.arrays, s.rules.fusible
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
def _flip(s, nodes, values):  # type: ignore[no-untyped-def]
    """Set some nodes that follow each other to one of the last so many values."""
    first = last = np.random.randint(len(s.flippable))
    while last + 1 < len(s.flippable) and np.random.random() < 0.8:
        last += 1
    nodes[s.flippable[first : last + 1]] = 3 - values + np.random.randint(values)


@compiled
def _move_cut(cuts):  # type: ignore[no-untyped-def]
    """Move, leave out or make a cut."""
    made, move = np.flatnonzero(cuts), np.random.random()
    if move < 0.6 and len(made):
        k = made[np.random.randint(len(made))]
        cuts[k] = False
        cuts[min(len(cuts) - 1, max(0, k + _near()))] = True
    elif move < 0.8 and len(made) > 1:
        cuts[made[np.random.randint(len(made))]] = False
    else:
        cuts[np.random.randint(len(cuts))] = True


@compiled
def _save(s, nodes, cut, value):  # type: ignore[no-untyped-def]
    """Set what is alive at a cut; there is none at -1, nor beyond the last."""
    if 0 <= cut < len(s.after):
        nodes[s.keep[s.keep_start[cut] : s.keep_start[cut + 1]]] = value


@compiled
def _set_nodes(s, nodes):  # type: ignore[no-untyped-def]
    """Set what is between two cuts, or save at another cut what is saved at one."""
    cuts, kind = len(s.after), np.random.random()
    if kind < 0.6:
        first = np.random.randint(cuts + 1) - 1
        last = min(cuts, first + abs(_near()))
        start = s.after[first] + 1 if first >= 0 else 0
        stop = s.after[last] + 1 if last < cuts else len(nodes)
        choice = np.random.randint(3)
        for i in range(start, stop):
            recomputed = choice == 0 or choice == 1 and not s.costly[i]
            nodes[i] = RECOMPUTED if recomputed else SAVED
        _save(s, nodes, first, SAVED)
        _save(s, nodes, last, SAVED)
    else:
        cut = np.random.randint(cuts)
        _save(s, nodes, cut, RECOMPUTED)
        if kind < 0.87:
            _save(s, nodes, min(cuts - 1, max(0, cut + _near())), SAVED)


@compiled
def _change(s, state, goal):  # type: ignore[no-untyped-def]
    """Change a state at random."""
    cuts = len(s.after)
    if len(s.flippable) and (not cuts or np.random.random() < goal.flipping):
        _flip(s, state[cuts:], 2 if goal.by_node else 3)
    elif goal.by_node:
        _set_nodes(s, state[cuts:])
    else:
        _move_cut(state[:cuts])


@compiled
def _most_bytes(goal, most, seconds):  # type: ignore[no-untyped-def]
    """The bytes with which a plan of so many seconds has an energy of ``most``; -1 for none."""
    left = most - goal.second_price * seconds
    return goal.limit + left / goal.byte_price if left >= 0 else -1.0


@compiled
def anneal(s, state, goal, seed, tries, hot, cold, known, archive, stop, done):  # type: ignore[no-untyped-def]
    """Anneal a state in place, to the one of least energy that was visited.

    ``hot`` and ``cold`` are the temperatures at the beginning and at the end, in units of the
    energy. The archive receives what is visited, ``known`` what is replayed. The search ends when
    the element of ``stop``, which another thread may set, is not 0; that of ``done`` counts the
    tries. Returns the energy.
    """
    np.random.seed(seed)
    t, f = s.rules.arrays, s.rules.fusible
    if len(s.after) + len(s.flippable) == 0:
        tries = 0
    new, least_state = state.copy(), state.copy()
    least = current = most = np.inf
    for step in range(-1, tries):  # the first is the plan as it is
        new[:] = state
        if step >= 0:
            if stop[0]:
                break
            done[0] += 1
            _change(s, new, goal)
            while np.random.random() < MORE:
                _change(s, new, goal)
            most = acceptable(current, hot, cold, step / tries, np.random.random())
        mask = unruled(s, new)
        slot = slot_of(known, mask, 0)
        limit = _most_bytes(goal, most, known.others[slot])
        is_new = known.limits[slot] < 0 or (known.pools[slot] < 0 and known.limits[slot] < limit)
        if is_new:
            order, reads = obey(s.rules, mask)
            known.others[slot] = added_seconds(s, mask, order)
            limit = _most_bytes(goal, most, known.others[slot])
            pool = plan_bytes(t, f, mask, order, reads, s.match_ranges, limit) if limit >= 0 else 0
            known.pools[slot] = pool if pool <= limit else -1
            known.limits[slot] = max(0.0, limit)
        pool, seconds = known.pools[slot], known.others[slot]
        if pool < 0 or pool > limit:
            continue
        current = goal.second_price * seconds + goal.byte_price * max(0.0, pool - goal.limit)
        if goal.by_node:
            if not is_new:
                obey(s.rules, mask)
            new[:] = named(s, mask)
        state[:] = new
        record(archive, pool, seconds, state)
        if current < least:
            least = current
            least_state[:] = state
    state[:] = least_state
    return least
