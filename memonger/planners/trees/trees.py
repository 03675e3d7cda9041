"""Recursive checkpointing trees, and the schedules that they stand for.

A node of a tree stands for a segment of the network: the operators at positions lo..hi-1 of the
execution order. Their gradients are to be computed while what they need of earlier operators is
saved. The node has the cut of the segment: run forward to the cut, process the right part, then the
left one. Its flag says what of the left part is saved meanwhile. A leaf runs what its gradients
read and is still missing, then the gradients; a lazy one runs what a gradient reads right before
that, as MXNet does with marks. Everything that runs is read: by the gradients of the segment, by
operators on the way to them, or as an output of the network.

A tree is an array of int32, (nodes, 2): cuts (positions, or `LEAF`) and flags in preorder, the left
part before the right one.
"""

from __future__ import annotations

import functools
from math import comb

import numpy as np

from memonger.support.errors import MemongerError
from memonger.support.kernels import Struct, constant
from memonger.support.types import Int32s

LEAF = constant("LEAF")  # instead of a cut: the segment is not divided
LAZY = constant("LAZY")  # the flag of a lazy leaf

#: What is saved of the left part while the right one is processed, besides what the right one
#: reads: what is alive at the cut and the left part's gradients read, all that they read, the
#: results of costly operators, or nothing.
ALIVE, ALL, COSTLY, NOTHING = map(constant, ("ALIVE", "ALL", "COSTLY", "NOTHING"))

MOST_NODES = constant("MOST_NODES")  # that a tree may grow to, for each operator


class Steps(Struct):
    """The forward operators of a network by position."""


def fewest_states(steps: int, repeats: int) -> int:
    """Return how many states to save so that no step runs more often than ``repeats`` times."""
    states = 1
    while _reach(states, repeats) < steps:
        states += 1
    return states


def binomial_tree(steps: int, states: int) -> Int32s:
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
    """Return how many steps can be reversed if none runs more often than ``repeats`` times."""
    return comb(states + repeats, states) if repeats >= 0 else 0


@functools.lru_cache(maxsize=2**16)
def _first_part(steps: int, states: int) -> int:
    """Return the fewest steps left of the first cut of an optimal schedule (equation 5)."""
    repeats = 0
    while _reach(states, repeats) < steps:
        repeats += 1
    return max(1, _reach(states, repeats - 2), steps - _reach(states - 1, repeats))
