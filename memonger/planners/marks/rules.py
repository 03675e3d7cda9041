"""Apply the rules that make a plan of marks valid: which operators may be recomputed.

Five rules apply to any plan:
1. An operator that must run once is kept (``ForwardGraph.why_kept``).
2. Operators that MXNet merges as a common sub-expression share one mark. With different marks it
   would not merge them, and gradients would add up in another order.
3. A recomputed operator whose first output has no reader is kept, unless it tolerates that. Keeping
   one may leave the next without a reader, so the rule is repeated until nothing changes.
4. Where pointwise fusion may be on, data must tie the recomputed copy of an operator to the
   gradient that runs after it; a control dependency is not enough. Fusion looks at data only
   (``src/executor/pointwise_fusion_pass.cc``) and may otherwise put the copy's inputs and that
   gradient into one kernel: a cycle through the copy, and a bind that fails. For the same reason a
   result is kept there if so many operators read it that its gradient is summed in a chain (of
   control dependencies).
5. Where MKLDNN may compute, every tensor has the layout that it has without a plan
   (``layout_rule``).
"""

from __future__ import annotations

from collections import Counter
from typing import Iterable, Sequence

import numpy as np

from memonger.costs.layouts import UsualLayouts, find_wrong_poolings
from memonger.costs.pool import pool
from memonger.costs.usage import Usage
from memonger.graph.arrays import GraphArrays
from memonger.graph.forward import (
    FLOAT,
    ForwardGraph,
    Insertion,
    SavedIdentity,
    insert_identities,
    with_identities,
)
from memonger.graph.operators.recompute import (
    ANYWHERE,
    CPU,
    GPU_FUSION,
    tolerates_unread,
    truth,
    why_refused,
)
from memonger.graph.training import Differentiation, TrainingGraph
from memonger.planners.marks.layout_rule import NO_RULE, layout_rule
from memonger.support.cache import Latest
from memonger.support.errors import MemongerError
from memonger.support.kernels import Struct, compiled
from memonger.support.types import Bools, Int32s, Int64s

BLOCK = 16  # the most channels in a block of MKLDNN's


class Rules:
    """The rules for one network.

    Parameters
    ----------
    trainings : sequence of TrainingGraph
        One for each set of gradients that a training may request (of all arguments, of the
        parameters alone). The rules apply to all of them.
    targets : frozenset of str
        The kinds of devices on which the network may be trained.
    kept, forced : sequence of int
        Nodes that the user excludes from recomputation, and nodes to recompute if the rules allow.
    insertion : Insertion or None
        The saved identities of the network, if it has any.
    """

    def __init__(
        self,
        trainings: Sequence[TrainingGraph],
        targets: frozenset[str] = ANYWHERE,
        kept: Sequence[int] = (),
        forced: Sequence[int] = (),
        insertion: Insertion | None = None,
    ) -> None:
        self.trainings, self.targets, self.kept = trainings, targets, kept
        self.graph: ForwardGraph = trainings[0].graph
        self.insertion = insertion or insert_identities([n.name for n in self.graph.nodes])
        self._with_identities: Latest[Rules] = Latest(1)
        #: Operator that must be kept -> the reason.
        self.reasons = self._reasons()
        #: (nodes,): whether each node may be recomputed. Variables may not.
        self.recomputable = np.zeros(len(self.graph.nodes), dtype=np.bool_)
        self.recomputable[[i for i in self.graph.operators if i not in self.reasons]] = True
        self.recomputable[list(kept)] = False
        #: (nodes,): whether every plan recomputes it. Nodes that MXNet merges share a mark.
        same = np.array(trainings[0].same, dtype=np.int64)
        self.forced = np.isin(same, same[list(forced)])
        # A network in which plans can change layouts gets no identities. So the layout rule is not
        # needed for one with identities.
        blocked = insertion is None and CPU in targets and trainings[0].settings.mkldnn
        tolerant = self._tolerant()
        #: The rules for compiled code, one for each training graph.
        self.arrays = [
            self._arrays(training, layout_rule(training) if blocked else NO_RULE, tolerant)
            for training in trainings
        ]

    def with_identities(self, identities: Iterable[SavedIdentity]) -> Rules:
        """Return the rules of the network with these saved identities; cache the latest."""
        key = tuple(identities)
        known = self._with_identities.get(key) if key else self
        if known is not None:
            return known
        graph, insertion = with_identities(self.graph, key)
        index = insertion.new_index
        gradients = Differentiation(graph, self.trainings[0].settings)
        trainings = [gradients.respect_to(index[a] for a in t.wanted) for t in self.trainings]
        kept = [index[i] for i in self.kept]  # they have no identities
        forced = [index[i] for i in np.flatnonzero(self.forced)]
        extended = type(self)(trainings, self.targets, kept, forced, insertion)
        self._with_identities.put(key, extended)
        return extended

    @property
    def watches_layouts(self) -> bool:
        """Whether the layout rule applies to plans of the network."""
        return any(len(arrays.layouts.read) for arrays in self.arrays)

    @property
    def slowness(self) -> int:
        """The time to apply the rules and replay, roughly, in times of a replay alone."""
        return 3 if self.watches_layouts else 1

    def _reasons(self) -> dict[int, str]:
        reasons, first = {}, self.trainings[0]
        for i in self.graph.operators:
            reason = self.graph.why_kept(i)
            if reason is None and GPU_FUSION in self.targets:
                if first.facts[i].summed >= first.settings.sum_cap:
                    reason = "so many operators read it that fusion may fail"
            if reason is not None:
                reasons[i] = reason
        if CPU in self.targets and first.settings.mkldnn:
            text = "MKLDNN computes its gradient from another layout of its input"
            reasons.update(dict.fromkeys(find_wrong_poolings(first), text))
        return reasons

    def _arrays(
        self, training: TrainingGraph, layouts: UsualLayouts, tolerant: Bools
    ) -> RuleArrays:
        t, facts = training.arrays, training.facts
        n, read_start = t.forward_nodes, t.read_start
        reader = np.repeat(np.arange(n), np.diff(read_start[: n + 1]))
        place = np.arange(len(reader)) - read_start[reader]
        start, read = compiled.group_by_key(t.read_row[: len(reader)], n)
        of_nodes = [(f.own_output, f.follows, bool(f.passes)) for f in facts]
        own_output, follows, any_gradient = np.array(of_nodes, dtype=np.bool_).T.copy()
        pairs = zip(reader.tolist(), place.tolist())
        of_reads = [(k in facts[x].passes, k in facts[x].inputs) for x, k in pairs]
        passes, held = np.array(of_reads, dtype=np.bool_).reshape(-1, 2).T.copy()
        return RuleArrays(
            arrays=t,
            own_output=own_output,
            follows=follows,
            any_gradient=any_gradient,
            used_start=start,
            used_by=read,
            reader=reader,
            passes=passes,
            held=held,
            recomputable=self.recomputable,
            tolerant=tolerant,
            fusion=GPU_FUSION in self.targets,
            same=np.array(training.same, dtype=np.int64),
            layouts=layouts,
        )

    def _tolerant(self) -> Bools:
        """Return for each node whether it may be recomputed without a reader, (nodes,)."""
        graph, mkldnn = self.graph, self.trainings[0].settings.mkldnn
        native = set(self.native(self.recomputable))
        tolerant = np.zeros(len(graph.nodes), dtype=np.bool_)
        for i in graph.operators:
            node = graph.nodes[i]
            attrs = dict(node.attrs, cudnn_off="True") if i in native else node.attrs
            dtypes = [graph.tensors[a][b].dtype for a, b in node.inputs]
            tolerant[i] = tolerates_unread(node.op, attrs, dtypes, self.targets, mkldnn)
        return tolerant

    def native(self, mask: Bools) -> list[int]:
        """List the recomputed nodes that must run MXNet's own kernel instead of cuDNN's.

        cuDNN's BatchNorm updates its running mean and variance in the forward pass, so a recomputed
        one would update them twice a step. MXNet's own updates them in the backward pass
        (``src/operator/nn/batch_norm.cu``).
        """
        if self.targets <= {CPU}:
            return []
        return [
            i
            for i, node in enumerate(self.graph.nodes)
            if mask[i]
            and node.op == "BatchNorm"
            and not truth(node.attrs.get("cudnn_off"))
            and not truth(node.attrs.get("use_global_stats"))
        ]

    def plan_memory(self, mask: Bools) -> Usage:
        """Return the memory of the network where these nodes are recomputed."""
        return pool(self.trainings[0], mask)

    def apply(self, mask: Bools) -> Bools:
        """Return the nodes of a plan that the rules allow to recompute.

        Parameters
        ----------
        mask : array of bool, (nodes,)
            The plan: which nodes are recomputed.

        Returns
        -------
        array of bool, (nodes,)
            A subset of ``mask`` and the forced nodes; ``mask`` is not changed.
        """
        mask = np.array(mask, dtype=np.bool_) | self.forced
        while True:
            before = mask.sum()
            for arrays in self.arrays:
                compiled.apply_rules(arrays, mask)
            if mask.sum() == before:
                return mask


class RuleArrays(Struct):
    """The rules for one training graph."""

    arrays: GraphArrays
    own_output: Bools
    follows: Bools
    any_gradient: Bools
    used_start: Int32s
    used_by: Int32s
    reader: Int64s
    passes: Bools
    held: Bools
    recomputable: Bools
    tolerant: Bools
    fusion: bool
    same: Int64s
    layouts: UsualLayouts


def refuse(graph: ForwardGraph) -> None:
    """Raise MemongerError if an operator of the network cannot be planned."""
    for node in graph.nodes:
        reason = None if node.is_variable else why_refused(node.op, node.attrs)
        if reason is not None:
            raise MemongerError(f"node {node.name!r} ({node.op}) cannot be planned: {reason}")


def refuse_padded_sums(training: TrainingGraph) -> None:
    """Raise MemongerError if MKLDNN may fail to add the gradients of a Deconvolution's weight.

    It lays such a gradient out in blocks, which it pads if a weight has few channels. Whether the
    gradients of several readers of one weight can be added then depends on the memory plan. Where
    they cannot, MXNet raises an error or the process dies, in plain MXNet too.
    """
    graph = training.graph
    readers = Counter(entry for i in graph.operators for entry in graph.nodes[i].inputs)
    for i in graph.operators:
        node = graph.nodes[i]
        if node.op != "Deconvolution":
            continue
        a, b = node.inputs[1]
        weight, groups = graph.tensors[a][b], int(node.attrs.get("num_group", 1))
        is_padded = any(n % BLOCK for n in (weight.shape[0] // groups, weight.shape[1]))
        is_trained = a in training.wanted or not graph.nodes[a].is_variable
        if weight.dtype == FLOAT and readers[a, b] > 1 and is_padded and is_trained:
            raise MemongerError(
                f"node {node.name!r} ({node.op}) cannot be planned: MKLDNN may fail to add the "
                "gradients of a weight of few channels that several operators read, depending on "
                "the memory plan; set MXNET_MKLDNN_ENABLED=0, or plan for GPUs with ctx='gpu'"
            )


def kept_summary(reasons: Iterable[tuple[str, str]]) -> str:
    """Return the counts of operators that are kept by rule, for the log: '3 Dropout, 1 Custom'."""
    counts = Counter(op for op, _ in reasons)
    return ", ".join(f"{count} {op}" for op, count in counts.most_common())
