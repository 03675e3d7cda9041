"""Saved identities: where they may stand, and which of them a plan needs."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from memonger.graph.forward import Insertion, SavedIdentity
from memonger.graph.operators.recompute import fuses
from memonger.planners.candidates import MarkPlan
from memonger.planners.marks.cuts import Cut
from memonger.planners.marks.rules import Rules
from memonger.support.types import Bools


def copyable(rules: Rules) -> tuple[SavedIdentity, ...]:
    """List the copies that may help, and may stand where they do.

    Their gradients read inputs, which they would hold if they were kept themselves. They are tied
    where the recomputed copy of the operator must be read, which its gradient does not do. Fusion
    leaves them alone where the network is trained with it and nowhere else than on a GPU. A network
    whose plans must watch MKLDNN's layouts gets none.
    """
    if rules.watches_layouts:
        return ()
    graph, facts = rules.graph, rules.trainings[0].facts
    tolerant, unfused = rules.arrays[0].tolerant, fuses(rules.targets)
    return tuple(
        SavedIdentity(
            i, "" if tolerant[i] or facts[i].own_output else graph.tensors[i][0].dtype, unfused
        )
        for i in _copyable_nodes(rules)
        # A scalar (shape ()) would come out of a tie with an axis.
        if rules.allowed[i] and not rules.forced[i]
        if facts[i].inputs and graph.tensors[i][0].shape
    )


def _copyable_nodes(rules: Rules) -> list[int]:
    """List the nodes that a copy may stand behind.

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


def copies_at(rules: Rules, cuts: Sequence[Cut]) -> tuple[SavedIdentity, ...]:
    """List the copies that may help where the network is cut.

    Those of what is kept, and where that needs none (a sum, whose gradient reads nothing), of what
    it was computed from: nobody would read that again.
    """
    copy_of_node = {copy.node: copy for copy in copyable(rules)}
    graph, facts = rules.graph, rules.trainings[0].facts
    seen: set[int] = set()
    pending = [i for cut in cuts for i in cut.keep]
    while pending:
        i = pending.pop()
        if i not in seen and not graph.nodes[i].is_variable:
            seen.add(i)
            if i not in copy_of_node and not facts[i].inputs:
                pending.extend(a for a, _ in graph.nodes[i].inputs)
    return tuple(copy_of_node[i] for i in sorted(seen & set(copy_of_node)))


def cuts_behind_copies(cuts: Sequence[Cut], insertion: Insertion) -> list[Cut]:
    """Translate cuts of a network to the network with copies, where the copies are kept."""
    # Cuts share entries, of which there may be as many as nodes in each of hundreds of cuts.
    new_entry = {old: insertion.entry(*old) for old in {e for cut in cuts for e in cut.entries}}
    return [
        Cut(insertion.entry(cut.after, 0)[0], tuple([new_entry[entry] for entry in cut.entries]))
        for cut in cuts
    ]


def drop_unused_identities(plain: Rules, plan: MarkPlan) -> tuple[MarkPlan, Rules, Bools]:
    """Return the part of a plan that is right, with none but the copies that it needs.

    ``plain`` are the rules of the network without copies. Returned besides are the rules of the
    network with the copies that are left, and the nodes of it that are recomputed.
    """
    while True:
        rules = plain.with_copies(plan.copies)
        extended = rules.apply(rules.insertion.extend(plan.mask))
        copies = rules.insertion.needed(extended)
        settled = MarkPlan(extended[rules.insertion.new_index], copies)
        if copies == plan.copies:
            return settled, rules, extended
        plan = settled
