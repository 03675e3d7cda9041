"""List saved identities that may help a plan, and drop those that a plan does not use."""

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
    """List the saved identities that may help a plan.

    The gradient of a node with such an identity reads inputs, which would stay in memory if the
    node itself was saved. Operators read the first output of the node and no other, so that the
    identity runs right after the node. The node is not an output of the network, where an identity
    would change the order in which two gradients are added.

    The identity is tied if the recomputed node must have a reader and its own gradient does not
    read it. It is unfused if the network is trained on GPUs only.

    Returns
    -------
    tuple of SavedIdentity
        In execution order; empty for a network in which plans can change layouts of MKLDNN.
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
        may_help = rules.recomputable[i] and not rules.forced[i] and facts[i].inputs
        # A scalar (shape ()) would come out of a fusion barrier with an axis.
        if may_help and i in read and unmerged[same[i]] and tensor.shape:
            is_free = tolerant[i] or facts[i].own_output
            identities.append(SavedIdentity(i, "" if is_free else tensor.dtype, unfused))
    return tuple(identities)


def identities_at(rules: Rules, cuts: Sequence[Cut]) -> tuple[SavedIdentity, ...]:
    """List the identities that may help at these cuts.

    They are the identities of the results that the cuts save. A node whose gradient reads nothing,
    such as a sum, needs no identity; there the list has those of its inputs.
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
    """Return the cuts of the network with identities, which save identities in place of nodes."""
    # Cuts share entries: hundreds of cuts may have as many entries each as there are nodes.
    new_entry = {old: insertion.entry(*old) for old in {e for cut in cuts for e in cut.entries}}
    return [
        Cut(insertion.entry(cut.after, 0)[0], tuple([new_entry[entry] for entry in cut.entries]))
        for cut in cuts
    ]


def drop_unused_identities(plain: Rules, plan: MarkPlan) -> tuple[MarkPlan, Rules, Bools]:
    """Apply the rules to a plan, and drop the identities that it does not save.

    Parameters
    ----------
    plain : Rules
        The rules of the network without identities.
    plan : MarkPlan
        A plan of that network.

    Returns
    -------
    MarkPlan
        The plan by the rules.
    Rules
        The rules of the network with the remaining identities.
    array of bool
        (nodes of that network,): which of them are recomputed.
    """
    while True:
        rules = plain.with_identities(plan.identities)
        extended = rules.apply(rules.insertion.extend(plan.mask))
        used = rules.insertion.find_used(extended)
        applied = MarkPlan(extended[rules.insertion.new_index], used)
        if used == plan.identities:
            return applied, rules, extended
        plan = applied
