"""Saved identities: the nodes that may have one, and those that a plan uses."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from memonger.graph.forward import Insertion, SavedIdentity
from memonger.graph.operators.recompute import fuses
from memonger.planners.candidates import MarkPlan
from memonger.planners.marks.cuts import Cut
from memonger.planners.marks.rules import Rules
from memonger.support.types import Bools


def list_identities(rules: Rules) -> tuple[SavedIdentity, ...]:
    """List the saved identities that may help, each behind a node that may have one.

    The gradient of such a node reads inputs, which the node would hold if it was saved itself. Its
    first output alone is read, by operators, so that the identity runs right after it; it is no
    output of the network, where two gradients would be added up in another order. The identity is
    tied where the recomputed node must be read, and its own gradient does not read it. Fusion
    leaves it alone where the network is trained on GPUs only. A network whose plans must watch
    MKLDNN's layouts gets none.
    """
    if rules.watches_layouts:
        return ()
    graph, facts, same = rules.graph, rules.trainings[0].facts, rules.trainings[0].same
    tolerant, unfused = rules.arrays[0].tolerant, fuses(rules.targets)
    read = {a for node in graph.nodes for a, b in node.inputs if b == 0}
    read -= {a for node in graph.nodes for a, b in node.inputs if b > 0}
    read -= {d for node in graph.nodes for d in node.deps}
    read -= {a for a, _ in graph.heads}
    unmerged = np.bincount(same) == 1
    identities = []
    for i in graph.operators:
        tensor = graph.tensors[i][0]
        may_help = rules.allowed[i] and not rules.forced[i] and facts[i].inputs
        # A scalar (shape ()) would come out of a fusion barrier with an axis.
        if may_help and i in read and unmerged[same[i]] and tensor.shape:
            is_free = tolerant[i] or facts[i].own_output
            identities.append(SavedIdentity(i, "" if is_free else tensor.dtype, unfused))
    return tuple(identities)


def identities_at(rules: Rules, cuts: Sequence[Cut]) -> tuple[SavedIdentity, ...]:
    """List the identities that may help where the network is cut.

    Those of what is saved; and where a node needs none (a sum, whose gradient reads nothing), of
    what it was computed from, which nobody would read again.
    """
    identity_of = {identity.node: identity for identity in list_identities(rules)}
    graph, facts = rules.graph, rules.trainings[0].facts
    seen: set[int] = set()
    pending = [i for cut in cuts for i in cut.keep]
    while pending:
        i = pending.pop()
        if i not in seen and not graph.nodes[i].is_variable:
            seen.add(i)
            if i not in identity_of and not facts[i].inputs:
                pending.extend(a for a, _ in graph.nodes[i].inputs)
    return tuple(identity_of[i] for i in sorted(seen & set(identity_of)))


def cuts_behind_identities(cuts: Sequence[Cut], insertion: Insertion) -> list[Cut]:
    """Translate cuts of a network to the network with identities, which are saved there."""
    # Cuts share entries, of which there may be as many as nodes in each of hundreds of cuts.
    new_entry = {old: insertion.entry(*old) for old in {e for cut in cuts for e in cut.entries}}
    return [
        Cut(insertion.entry(cut.after, 0)[0], tuple([new_entry[entry] for entry in cut.entries]))
        for cut in cuts
    ]


def drop_unused_identities(plain: Rules, plan: MarkPlan) -> tuple[MarkPlan, Rules, Bools]:
    """Apply the rules to a plan, and drop the identities that it does not save.

    ``plain`` are the rules of the network without identities. Returns the plan, the rules of the
    network with the identities that are left, and the nodes of that network that are recomputed.
    """
    while True:
        rules = plain.with_identities(plan.identities)
        extended = rules.apply(rules.insertion.extend(plan.mask))
        used = rules.insertion.find_used(extended)
        applied = MarkPlan(extended[rules.insertion.new_index], used)
        if used == plan.identities:
            return applied, rules, extended
        plan = applied
