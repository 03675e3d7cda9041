"""Reversal of a chain of equal steps with the fewest forward steps: the binomial schedule.

Also known as treeverse (Griewank 1992, "Achieving logarithmic growth of temporal and spatial
complexity in reverse automatic differentiation") and Revolve (Griewank and Walther 2000, ACM TOMS
26(1), algorithm 799). To reverse steps lo..hi-1 with s states kept, the one at lo among them: run
forward to a cut, reverse what is right of it with s - 1 states, then what is left of it with s.

It is provably optimal if all steps cost the same, all states are equally large, and a state that is
kept takes up a place until it is no longer wanted. Real networks are none of that: the search on
any graph (``recursive``) starts from it among others, and is held against it. On chains of equal
layers that must find schedules that take no more memory for the same work.
"""

from __future__ import annotations

import functools
from math import comb
from typing import List, Tuple

from memonger.planners.trees.unroll import LEAF
from memonger.support.errors import MemongerError

#: A binary tree of cuts in preorder: (position, flag), the left part before the right one;
#: (LEAF, 0) for a part that is not divided.
Tree = List[Tuple[int, int]]


def reach(states: int, repeats: int) -> int:
    """How many steps can be reversed if none runs more often than ``repeats`` times.

    The beta(s, r) of Griewank and Walther (2000), a binomial coefficient.
    """
    return comb(states + repeats, states) if repeats >= 0 else 0


def forward_steps(steps: int, states: int) -> int:
    """The fewest forward steps, without the one of each step's own reversal (equation 1).

    Parameters
    ----------
    steps : int
        Of the chain.
    states : int
        That can be kept at once, the first among them.

    Examples
    --------
    >>> forward_steps(10, 3)  # figure 1 of Griewank and Walther (2000)
    15
    """
    repeats = _repeats(steps, states)
    return repeats * steps - reach(states + 1, repeats - 1)


def fewest_states(steps: int, repeats: int) -> int:
    """How many states must be kept at least so that no step runs more often than ``repeats`` times.

    Parameters
    ----------
    steps : int
    repeats : int
        At least 1.
    """
    states = 1
    while reach(states, repeats) < steps:
        states += 1
    return states


def binomial_tree(steps: int, states: int) -> Tree:
    """The cuts of a binomial schedule for a chain of so many steps.

    Parameters
    ----------
    steps : int
        At least 1; position p is before step p.
    states : int
        At least 1: the state before the first step is kept in any case.

    Raises
    ------
    MemongerError
        If there is nothing to reverse, or no state to start from.
    """
    if steps < 1 or states < 1:
        raise MemongerError(
            f"a chain of {steps} steps with {states} states kept cannot be reversed; both must be "
            "1 or more"
        )
    tree: Tree = []
    pending = [(0, steps, states)]
    while pending:
        lo, hi, kept = pending.pop()
        if hi - lo == 1:
            tree.append((LEAF, 0))
            continue
        cut = lo + _first_part(hi - lo, kept)
        tree.append((cut, 0))
        pending.append((cut, hi, kept - 1))
        pending.append((lo, cut, kept))
    return tree


def _repeats(steps: int, states: int) -> int:
    """How often a step must run at most: the least r whose reach is enough."""
    repeats = 0
    while reach(states, repeats) < steps:
        repeats += 1
    return repeats


@functools.lru_cache(maxsize=2**16)
def _first_part(steps: int, states: int) -> int:
    """The fewest steps that may lie left of the first cut of an optimal schedule (equation 5)."""
    repeats = _repeats(steps, states)
    return max(1, reach(states, repeats - 2), steps - reach(states - 1, repeats))
