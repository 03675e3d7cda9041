"""Simulated annealing of recomputation masks, compiled.

A plan is evaluated as the rules leave it, replayed to the byte. Steps that raise its energy are
taken with a probability that falls as the search cools (Kirkpatrick et al. 1983, "Optimization by
Simulated Annealing"). The same seed gives the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.planners.annealing import Archive, Known
from memonger.planners.marks.rules import RuleArrays
from memonger.support.kernels import call

AS_CUTS, SAVED, RECOMPUTED = 0, 1, 2  # of a node in a state; as in anneal.c


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


def plan_of(s: Space, state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tell the nodes that a state recomputes by the rules, and what ``obey`` tells of them."""
    return call("plan_of", s, state)


def named(s: Space, mask: np.ndarray) -> np.ndarray:
    """Make the state that names what a plan does with each node."""
    return call("named", s, mask)


def evaluate(s: Space, state: np.ndarray) -> tuple[int, float]:
    """Tell the bytes that a state costs, and the seconds that it adds."""
    return call("evaluate_state", s, state)


def anneal(
    s: Space,
    state: np.ndarray,
    goal: Goal,
    seed: int,
    tries: int,
    hot: float,
    cold: float,
    known: Known,
    archive: Archive,
    stop: np.ndarray,
    done: np.ndarray,
) -> float:
    """Anneal a state in place, to the one of least energy that was visited.

    ``hot`` and ``cold`` are the temperatures at the beginning and at the end, in units of the
    energy. The archive receives what is visited, ``known`` what is replayed. The search ends when
    the element of ``stop``, which another thread may set, is not 0; that of ``done`` counts the
    tries. Returns the energy.
    """
    heat, to = (hot, cold), (known, archive, stop, done)
    return call("anneal_masks", s, state, goal, seed, tries, *heat, *to)
