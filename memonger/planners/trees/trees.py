"""Recursive checkpointing trees, which represent schedules.

A node of a tree represents a segment of the network: the operators at positions lo..hi-1 of the
execution order, whose gradients are to be computed while the results of earlier operators that they
need are saved. An inner node has the cut of its segment: run forward to the cut, process the right
part, then the left part. Its flag says which results of the left part are saved meanwhile. A leaf
recomputes all results that its gradients read and that are not saved, then runs the gradients. A
lazy leaf recomputes what a gradient reads right before that gradient, as MXNet does with marks.
Nothing runs whose result is not read, by a gradient of the segment, by an operator that such a
gradient needs, or as an output of the network.

A tree is an array of int32, (nodes, 2): cuts (positions, or `LEAF`) and flags in preorder, the left
part before the right one.
"""

from __future__ import annotations

import functools
from math import comb

import numpy as np

from memonger.support.errors import MemongerError
from memonger.support.kernels import Struct, constant
from memonger.support.types import Bools, Doubles, Int32s

LEAF = constant("LEAF")  # instead of a cut: the segment is not divided
LAZY = constant("LAZY")  # the flag of a lazy leaf

#: Which results of the left part are saved while the right part is processed, besides those that
#: the right part reads: results alive at the cut that gradients of the left part read, all results
#: that these gradients read, results of costly operators, or none.
ALIVE, ALL, COSTLY, NOTHING = map(constant, ("ALIVE", "ALL", "COSTLY", "NOTHING"))

MOST_NODES = constant("MOST_NODES")  # limit of the nodes of a tree, for each operator


class Positions(Struct):
    """The forward operators of a network, by position in the execution order."""

    read_start: Int32s
    read: Int32s
    want_start: Int32s
    want: Int32s
    last: Int32s
    first_want: Int32s
    heads: Int32s
    always_saved: Bools
    gradient: Bools
    costly: Bools
    work: Doubles
    forced: Bools


def fewest_states(steps: int, repeats: int) -> int:
    """Return the fewest states to save such that no step runs more than ``repeats`` times."""
    states = 1
    while _reach(states, repeats) < steps:
        states += 1
    return states


def binomial_tree(steps: int, states: int) -> Int32s:
    """Make the binomial schedule of a chain, which has the fewest forward steps.

    Also known as treeverse (Griewank 1992) and Revolve (Griewank and Walther 2000, ACM TOMS 26(1),
    algorithm 799). To reverse steps lo..hi-1 with s saved states (one of them at lo): run forward
    to a cut, reverse the right part with s - 1 states, then the left part with s states. This is
    optimal if all steps cost the same and all states have the same size.

    Parameters
    ----------
    steps : int
        The number of steps of the chain.
    states : int
        The number of states that may be saved at once.

    Returns
    -------
    np.ndarray
        The tree, (nodes, 2) of int32.

    Raises
    ------
    MemongerError
        If one of the numbers is less than 1.
    """
    if steps < 1 or states < 1:
        raise MemongerError(
            f"a chain of {steps} steps cannot be reversed with {states} saved states; both must be "
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
    """Return how many steps can be reversed if no step runs more than ``repeats`` times."""
    return comb(states + repeats, states) if repeats >= 0 else 0


@functools.lru_cache(maxsize=2**16)
def _first_part(steps: int, states: int) -> int:
    """Return the fewest steps left of the first cut of an optimal schedule (equation 5, 2000)."""
    repeats = 0
    while _reach(states, repeats) < steps:
        repeats += 1
    return max(1, _reach(states, repeats - 2), steps - _reach(states - 1, repeats))
