"""The rules that keep a plan right: what may be recomputed, and what must then be read.

Four rules, for whatever a planner proposes:
1. An operator that must run once is kept (``operators.why_kept``).
2. Operators that MXNet merges as a common sub-expression share one mark. With different marks it
   would not merge them, and gradients would add up in another order.
3. A recomputed operator whose first output nobody reads is kept, unless it tolerates that. Keeping
   one may leave the next unread, so this is repeated until nothing changes.
4. Where pointwise fusion may be on, the recomputed copy of an operator must be tied by data, not by
   a control dependency alone, to the gradient that runs after it. Fusion looks at data only
   (``src/executor/pointwise_fusion_pass.cc``) and may otherwise put the copy's inputs and that
   gradient into one kernel: a cycle through the copy, and a bind that fails. For the same reason a
   result that so many operators read that its gradient is summed in a chain (of control
   dependencies) is kept there.
"""

from collections import Counter
from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numba import njit

from memonger.allocator import order_and_reads
from memonger.errors import MemongerError
from memonger.forward import ForwardGraph
from memonger.operators import (
    ANYWHERE,
    CPU,
    GPU_FUSION,
    tolerates_unread,
    truth,
    why_kept,
    why_refused,
)
from memonger.training import TrainingGraph, sum_cap


class Rules:
    """The rules for one network.

    Parameters
    ----------
    trainings : sequence of TrainingGraph
        One for each way in which the network may be trained (with gradients of all arguments, with
        those of its parameters alone); the rules hold for all of them.
    targets : frozenset of str
        Where it may be trained (``operators``).
    until : int, optional
        The node from which on everything is kept.
    """

    def __init__(
        self,
        trainings: Sequence[TrainingGraph],
        targets: FrozenSet[str] = ANYWHERE,
        until: Optional[int] = None,
    ) -> None:
        self.trainings, self.targets = trainings, targets
        self.graph: ForwardGraph = trainings[0].graph
        nodes = self.graph.nodes
        self.reasons: Dict[int, str] = {}
        for i, node in enumerate(nodes):
            reason = None if node.is_variable else why_kept(node.op, node.attrs)
            if reason is not None:
                self.reasons[i] = reason
        if GPU_FUSION in targets:
            for i, facts in enumerate(trainings[0].facts):
                if facts.summed >= sum_cap():
                    self.reasons.setdefault(i, "so many operators read it that fusion may fail")
        self.allowed = np.array(
            [not n.is_variable and i not in self.reasons for i, n in enumerate(nodes)],
            dtype=np.bool_,
        )
        if until is not None:
            self.allowed[until:] = False
        groups: Dict[int, List[int]] = {}
        for i, first in enumerate(trainings[0].same):
            groups.setdefault(first, []).append(i)
        self._twins = [np.array(group) for group in groups.values() if len(group) > 1]
        self._facts = [_facts_of(training) for training in trainings]
        native = set(self.native(np.ones(len(nodes), dtype=np.bool_)))
        self._tolerant = np.zeros(len(nodes), dtype=np.bool_)
        for i, node in enumerate(nodes):
            if not node.is_variable:
                attrs = dict(node.attrs, cudnn_off="True") if i in native else node.attrs
                dtypes = [self.graph.tensors[a][b].dtype for a, b in node.inputs]
                self._tolerant[i] = tolerates_unread(node.op, attrs, dtypes, targets)

    def native(self, mask: np.ndarray) -> List[int]:
        """The recomputed nodes that must not run cuDNN's kernel.

        cuDNN's BatchNorm moves its running mean and variance in the forward pass, so a recomputed
        one would move them twice a step; MXNet's own moves them in the backward pass
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

    def apply(self, mask: np.ndarray) -> np.ndarray:
        """The part of a plan that is right: a copy of ``mask`` with less recomputed."""
        mask = mask & self.allowed
        self._keep_twins(mask)
        while True:
            wrong = self.wrong(mask)
            if not wrong.any():
                return mask
            mask &= ~wrong
            self._keep_twins(mask)

    def wrong(self, mask: np.ndarray) -> np.ndarray:
        """The recomputed operators that rules 3 and 4 keep, as far as can be seen at once."""
        found = np.zeros(len(mask), dtype=np.bool_)
        for training, facts in zip(self.trainings, self._facts):
            _wrong(training.tables, facts, mask, self._tolerant, GPU_FUSION in self.targets, found)
        return found

    def _keep_twins(self, mask: np.ndarray) -> None:
        for twins in self._twins:
            if not mask[twins].all():
                mask[twins] = False


class _Facts(NamedTuple):
    """``GradientFacts`` as arrays: of each forward node, and of each of its inputs in turn."""

    own_output: np.ndarray
    follows: np.ndarray
    any_gradient: np.ndarray
    read_start: np.ndarray  # the inputs, numbered as in Tables, that read a node
    read: np.ndarray
    reader: np.ndarray  # of each input the node that has it
    passes: np.ndarray
    again: np.ndarray  # of each input whether the gradient reads it


def _facts_of(training: TrainingGraph) -> _Facts:
    tables, facts = training.tables, training.facts
    n = tables.forward
    count = int(tables.read_start[n])
    sources = tables.read_row[:count]
    reader = np.repeat(np.arange(n), np.diff(tables.read_start[: n + 1]))
    place = np.arange(count) - tables.read_start[reader]
    return _Facts(
        np.array([f.own_output for f in facts], dtype=np.bool_),
        np.array([f.follows for f in facts], dtype=np.bool_),
        np.array([bool(f.passes) for f in facts], dtype=np.bool_),
        np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=n))]),
        np.argsort(sources, kind="stable"),
        reader,
        np.array([k in facts[x].passes for x, k in zip(reader, place)], dtype=np.bool_),
        np.array([k in facts[x].inputs for x, k in zip(reader, place)], dtype=np.bool_),
    )


@njit(cache=True)
def _wrong(t, f, mask, tolerant, fusion, found):  # type: ignore[no-untyped-def]
    """Add to ``found`` what rules 3 and 4 keep in one training graph."""
    n = t.forward
    order, reads = order_and_reads(t, mask)
    copied = np.zeros(n, dtype=np.bool_)
    for row in order:
        if n <= row < 2 * n:
            copied[row - n] = True
            if reads[t.output_start[row]] == 0 and not tolerant[row - n]:
                found[row - n] = True
    if not fusion:
        return
    tied = np.zeros(n, dtype=np.bool_)  # whether a gradient before its own depends on its output
    for x in range(n - 1, -1, -1):
        if not copied[x]:
            continue
        tied[x] = f.own_output[x]
        if f.any_gradient[x] and not tied[x]:  # a gradient of zeros depends on nothing before it
            for q in range(f.read_start[x], f.read_start[x + 1]):
                j = f.read[q]
                c = f.reader[j]
                if copied[c] and f.passes[j] and (f.again[j] or f.own_output[c] or tied[c]):
                    tied[x] = True
        if f.follows[x] and not tied[x]:
            for j in range(t.read_start[x], t.read_start[x + 1]):
                if copied[t.read_row[j]] and not f.again[j]:
                    found[x] = True


def refuse(graph: ForwardGraph) -> None:
    """Refuse a network that cannot be planned, saying why."""
    for node in graph.nodes:
        reason = None if node.is_variable else why_refused(node.op, node.attrs)
        if reason is not None:
            raise MemongerError("node %r (%s) cannot be planned: %s" % (node.name, node.op, reason))


def kept_summary(reasons: Iterable[Tuple[str, str]]) -> str:
    """How many operators are kept by rule, for the log: '3 Dropout, 1 Custom'."""
    counts = Counter(op for op, _ in reasons)
    return ", ".join("%d %s" % (count, op) for op, count in counts.most_common())
