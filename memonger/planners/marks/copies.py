"""Saved identities: where they may stand, and which of them a plan needs."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from memonger.costs.fusion import list_fused_forward
from memonger.graph.forward import KeptCopy, mask_with_copies
from memonger.graph.operators.recompute import fuses
from memonger.planners.marks.cuts import Cut
from memonger.planners.marks.rules import Rules

MOST_SUMS = 8  # that are tried to keep apart from fusion, each by itself
WORTH = 0.01  # of the memory, that it must save


def copyable(rules: Rules) -> tuple[KeptCopy, ...]:
    """The copies that may help, and may stand where they do.

    Their gradients read inputs, which they would hold if they were kept themselves. They are tied
    where the recomputed copy of the operator must be read, which its gradient does not do. Fusion
    leaves them alone where the network is trained with it and nowhere else than on a GPU. A network
    whose plans must watch MKLDNN's layouts gets none.
    """
    if rules.watches_layouts:
        return ()
    graph, facts = rules.graph, rules.trainings[0].facts
    tolerant = rules.arrays[0].tolerant
    unfused = fuses(rules.targets)
    return tuple(
        KeptCopy(
            i, "" if tolerant[i] or facts[i].own_output else graph.tensors[i][0].dtype, unfused
        )
        for i in _places_for_copies(rules)
        if rules.allowed[i] and facts[i].inputs
    )


def _places_for_copies(rules: Rules) -> list[int]:
    """The nodes that a copy may stand behind.

    Their first output alone is read, by operators, so that the copy runs right after them; it is no
    output of the network, where two gradients would be added up in another order.
    """
    graph, same = rules.graph, rules.trainings[0].same
    read = {a for node in graph.nodes for a, b in node.inputs if b == 0}
    read -= {a for node in graph.nodes for a, b in node.inputs if b > 0}
    read -= {d for node in graph.nodes for d in node.deps}
    read -= {a for a, _ in graph.heads}
    alone = np.bincount(same) == 1  # not merged with another
    return [i for i in graph.operators if i in read and alone[same[i]]]


def copies_at(rules: Rules, cuts: Sequence[Cut]) -> tuple[KeptCopy, ...]:
    """The copies that may help where the network is cut.

    Those of what is kept, and where that needs none (a sum, whose gradient reads nothing), of what
    it was computed from: nobody would read that again.
    """
    possible = {copy.node: copy for copy in copyable(rules)}
    graph, facts = rules.graph, rules.trainings[0].facts
    found: set[int] = set()
    asked = [i for cut in cuts for i in cut.keep]
    while asked:
        i = asked.pop()
        if i not in found and not graph.nodes[i].is_variable:
            found.add(i)
            if i not in possible and not facts[i].inputs:
                asked.extend(a for a, _ in graph.nodes[i].inputs)
    return tuple(possible[i] for i in sorted(found & set(possible)))


def behind_copies(cuts: Sequence[Cut], moved: np.ndarray, copies: Sequence[KeptCopy]) -> list[Cut]:
    """The cuts of the plain network in the network with copies: there the copies are kept."""
    first = moved.copy()  # where the first output of each node stands
    for copy in copies:
        first[copy.node] += copy.offset
    # Cuts share entries, of which there may be as many as nodes in each of hundreds of cuts.
    known = {entry for cut in cuts for entry in cut.entries}
    here = {(a, b): (int(moved[a] if b else first[a]), b) for a, b in known}
    return [
        Cut(int(first[cut.after]), tuple([here[entry] for entry in cut.entries]), cut.size)
        for cut in cuts
    ]


def needed_copies(
    moved: np.ndarray, copies: Sequence[KeptCopy], mask: np.ndarray
) -> tuple[KeptCopy, ...]:
    """The copies that a plan of the network with copies makes use of: kept, of what is not."""
    return tuple(
        c for c in copies if c.apart or (mask[moved[c.node]] and not mask[moved[c.node] + c.offset])
    )


def settle(
    plain: Rules, mask: np.ndarray, copies: tuple[KeptCopy, ...]
) -> tuple[Rules, np.ndarray, np.ndarray, tuple[KeptCopy, ...]]:
    """The part of a plan that is right, with none but the copies that it needs.

    ``plain`` are the rules of the network without copies, ``mask`` its nodes to recompute. Returned
    are the rules of the network with the copies that are left and its recomputed nodes; those of
    the plain network, for ``marks.apply``; and the copies that are left.
    """
    while True:
        rules, moved = plain.with_copies(copies)
        full = rules.apply(mask_with_copies(mask, moved, copies, len(rules.graph.nodes)))
        mask, needed = full[moved], needed_copies(moved, copies, full)
        if needed == copies:
            return rules, full, mask, copies
        copies = needed


def apart_from_fusion(
    rules: Rules, mask: np.ndarray, copies: tuple[KeptCopy, ...]
) -> tuple[KeptCopy, ...]:
    """Identities in long sums of the forward pass, where a plan needs less memory with them.

    A sum that pointwise fusion makes one operator of holds all its terms until it runs. With
    something between that is not fused each term is gone once it has been added.
    """

    def cost(more: tuple[KeptCopy, ...]) -> int:
        made, full, _, _ = settle(rules, mask, tuple(sorted((*copies, *more))))
        return made.replay(full).pool_bytes

    training, least = rules.trainings[0], cost(())
    found: tuple[KeptCopy, ...] = ()
    places = {i for i in _places_for_copies(rules) if not training.facts[i].inputs}
    sums = [[i for i in nodes if i in places] for nodes in list_fused_forward(training, mask)]
    for nodes in [nodes for nodes in sums if nodes][:MOST_SUMS]:
        more = (*found, *(KeptCopy(i, unfused=True, apart=True) for i in nodes))
        with_more = cost(more)
        if with_more < least * (1 - WORTH):
            found, least = more, with_more
    return found
