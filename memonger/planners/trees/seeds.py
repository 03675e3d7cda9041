"""Trees of cuts from which a search for schedules starts (``recursive``).

Dynamic programming over trees whose cuts lie at few boundaries, and binomial trees over many.
"""

from __future__ import annotations

import math
from typing import Iterator, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.planners.trees.binomial import binomial_tree, fewest_states
from memonger.planners.trees.boundaries import boundaries
from memonger.planners.trees.entries import Entries, alive_at
from memonger.planners.trees.least_work import IMPOSSIBLE, least_work, tree_of
from memonger.planners.trees.pieces import Pieces, measure
from memonger.planners.trees.unroll import LEAF

POWERS = np.array([0.75, 0.5, 0.35, 0.2])  # of a tensor's bytes
SCALES = 4  # of memory, each closer to the least that is possible
SLOTS = 200  # steps of memory at each scale
WIDEST = 0.6  # of the memory without recomputation: the first scale
CLOSER = 1.5  # times the least memory that is possible: the last
#: Cuts: so many of any network, and more of those up to a thousand operators. The pieces between
#: them are measured in time that grows with the square of their number.
MOST_CUTS, MORE_CUTS, THOUSAND = 20, 120, 1000
MOST_INNER_CUTS = 16  # between two of them
MOST_REFINED_CUTS = 110  # of up to a thousand operators
MOST_OF_FAMILY = 40  # trees of one power and scale
STRIDES = (1, 2, 4, 8)  # binomial trees: boundaries at every operator, every second ...


Family = Tuple[int, float]
KNOWN = (-1, 0.0)  # the family of schedules that were known before


class Tree(NamedTuple):
    """A tree of cuts and what it costs.

    Attributes
    ----------
    pool_bytes : int
    work : float
    tree : np.ndarray of int32, (nodes, 2)
        Cuts and flags in preorder, as ``unroll`` reads them.
    family : (int, float)
        The power and the memory scale that it comes from; `KNOWN` for none.
    """

    pool_bytes: int
    work: float
    tree: np.ndarray
    family: Family


def dynamic(
    entries: Entries, replays: int, most_work: float | None = None
) -> Iterator[tuple[Family, list[np.ndarray]]]:
    """Trees of the whole frontier, or those about a limit of work, by dynamic programming.

    Pieces between neighbouring boundaries are divided further, at boundaries of their own. As many
    trees are made as have so many forward operators to be replayed.

    Yields
    ------
    (int, float)
        The family.
    list of np.ndarray
        Its trees, but for those that have been yielded already.
    """
    count = len(entries.node)
    alive = alive_at(entries)
    ends = np.array([0, count], dtype=np.int32)
    undivided = np.full(len(POWERS), np.inf)
    whole = measure(entries, ends, undivided).leaf[0, 0, 1]
    bounds = boundaries(alive, 0, count, MOST_CUTS + int(MORE_CUTS * _share(count)))
    outer = measure(entries, bounds, whole * WIDEST)
    inner: list[Pieces | None] = []
    for s, (lo, hi) in enumerate(zip(bounds.tolist(), bounds[1:].tolist())):
        within = boundaries(alive, lo, hi, MOST_INNER_CUTS)
        cap = outer.leaf[0, s, s + 1]
        inner.append(measure(entries, within, cap) if len(within) > 2 else None)
    seen: dict[bytes, None] = {}
    each = int(replays / count / len(POWERS) / SCALES) + 1
    for power in range(len(POWERS)):
        most = float(whole[power]) * WIDEST
        for scale in range(SCALES if most > 0 else 0):
            trees = list(_trees(outer, inner, power, most))
            if not trees:
                break
            if most_work is None:
                chosen = np.linspace(0, len(trees) - 1, min(each, len(trees))).astype(int)
            else:
                away = [abs(work - most_work) for _, _, work in trees]
                chosen = np.argsort(away, kind="stable")[:each]
            new = [trees[k][1] for k in chosen.tolist() if trees[k][1].tobytes() not in seen]
            seen.update((tree.tobytes(), None) for tree in new)
            yield (power, most), new
            # Even steps on the way to little more than the least that is possible.
            last = CLOSER * trees[0][0] / SLOTS
            most *= min(0.7, float(last ** (1 / max(1, SCALES - 1 - scale))))


def binomials(entries: Entries, more: range) -> list[np.ndarray]:
    """The binomial trees that repeat an operator at most so many times, for each of these."""
    count = len(entries.node)
    alive = alive_at(entries)
    trees: dict[bytes, np.ndarray] = {}
    for stride in STRIDES:
        bounds = boundaries(alive, 0, count, count // stride)
        for repeats in more:
            steps = len(bounds) - 1
            tree = np.array(binomial_tree(steps, fewest_states(steps, repeats)), dtype=np.int32)
            cut = tree[:, 0] != LEAF
            tree[cut, 0] = bounds[tree[cut, 0]]
            trees[tree.tobytes()] = tree
    return list(trees.values())


def refined(
    entries: Entries, replays: int, trees: Sequence[Tree]
) -> Iterator[tuple[Family, list[np.ndarray]]]:
    """Dynamic programming over the cuts of good trees and their neighbours; as `dynamic`."""
    count = len(entries.node)
    score: dict[int, float] = {}
    for rank, tree in enumerate(trees):
        for cut in tree.tree[tree.tree[:, 0] != LEAF, 0].tolist():
            score[cut] = score.get(cut, 0) + 1 / (1 + rank)
    cuts = sorted(score, key=lambda cut: (-score[cut], cut))
    near = [cut + away for away in (0, 1, -1, 2, -2, 3, -3) for cut in cuts]
    inside = list(dict.fromkeys(cut for cut in near if 0 < cut < count))
    inside = inside[: int(MOST_REFINED_CUTS * _share(count))]
    bounds = np.array([0, *sorted(inside), count], dtype=np.int32)
    families = list(dict.fromkeys(tree.family for tree in trees if tree.family != KNOWN))
    if not families:
        return
    most = np.zeros(len(POWERS))
    for power, scale in families:
        most[power] = max(most[power], scale)
    pieces = measure(entries, bounds, most)
    undivided: list[Pieces | None] = [None] * (len(bounds) - 1)
    each = int(replays / 2 / count / len(families)) + 1
    for power, scale in families:
        aim = float(np.mean([tree.work for tree in trees if tree.family == (power, scale)]))
        made = list(_trees(pieces, undivided, power, scale))
        made.sort(key=lambda found: abs(found[2] - aim))
        yield (power, scale), [tree for _, tree, _ in made[: min(each, MOST_OF_FAMILY)]]


def _trees(
    outer: Pieces, inner: Sequence[Pieces | None], power: int, most: float
) -> Iterator[tuple[int, np.ndarray, float]]:
    """For each memory up to ``most`` that makes a difference: its slot, the tree, its work."""
    nothing = np.full((1, SLOTS + 1), IMPOSSIBLE, dtype=np.float32)
    divided = np.repeat(nothing, len(inner), axis=0)
    choices = []
    for s, pieces in enumerate(inner):
        choices.append(nothing[:, :, None])
        if pieces is not None:
            none = np.repeat(nothing, len(pieces.bounds) - 1, axis=0)
            work, choice = least_work(pieces, power, most, SLOTS, none)
            divided[s], choices[s] = work[0, -1], choice
    work, choice = least_work(outer, power, most, SLOTS, divided)
    possible = np.flatnonzero(work[0, -1] < IMPOSSIBLE)
    better = np.append(True, np.diff(work[0, -1][possible]) < 0)
    for slot in possible[better[: len(possible)]].tolist():
        tree = tree_of(outer, choice, power, most, slot)
        joined = []
        for q, (cut, held) in enumerate(tree.tolist()):
            pieces = inner[LEAF - 1 - cut] if cut < LEAF else None
            joined.append(
                tree[q : q + 1]
                if pieces is None
                else tree_of(pieces, choices[LEAF - 1 - cut], power, most, held)
            )
        yield slot, np.concatenate(joined), float(work[0, -1, slot])


def _share(operators: int) -> float:
    """Of the cuts that a network of up to a thousand operators may have."""
    return math.sqrt(THOUSAND / max(THOUSAND, operators))
