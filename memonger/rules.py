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
from typing import Dict, FrozenSet, Iterable, List, Sequence, Set, Tuple

import numpy as np

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
    """

    def __init__(
        self, trainings: Sequence[TrainingGraph], targets: FrozenSet[str] = ANYWHERE
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
        same = trainings[0].same
        self._twins: List[List[int]] = [[i] for i in range(len(nodes))]
        for i, first in enumerate(same):
            if first != i:
                self._twins[first].append(i)
                self._twins[i] = self._twins[first]
        self._readers: List[List[Tuple[int, int]]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            if same[i] == i:
                for k, (a, _) in enumerate(node.inputs):
                    self._readers[same[a]].append((i, k))
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
        for i in np.flatnonzero(mask):
            if not all(mask[j] for j in self._twins[i]):
                self._keep(mask, i)
        while True:
            wrong = self.wrong(mask)
            if not wrong:
                return mask
            for i in wrong:
                self._keep(mask, i)

    def wrong(self, mask: np.ndarray) -> List[int]:
        """The recomputed operators that rules 3 and 4 keep, as far as can be seen at once."""
        return sorted(set(self.unread(mask)) | set(self.untied(mask)))

    def untied(self, mask: np.ndarray) -> List[int]:
        """The recomputed operators that only a control dependency ties to their gradient."""
        if GPU_FUSION not in self.targets:
            return []
        found: Set[int] = set()
        n = len(self.graph.nodes)
        for training in self.trainings:
            order, _ = order_and_reads(training.tables, mask)
            copied = np.zeros(n, dtype=np.bool_)
            copied[order[(order >= n) & (order < 2 * n)] - n] = True
            tied = np.zeros(n, dtype=np.bool_)  # a gradient before its own depends on its output
            for x in range(n - 1, -1, -1):
                if not copied[x]:
                    continue
                facts = training.facts[x]
                # A gradient of zeros depends on nothing that came before it.
                tied[x] = (
                    facts.own_output
                    or bool(facts.passes)
                    and any(
                        copied[c]
                        and k in training.facts[c].passes
                        and (
                            k in training.facts[c].inputs or training.facts[c].own_output or tied[c]
                        )
                        for c, k in self._readers[x]
                    )
                )
                inputs = self.graph.nodes[x].inputs
                again = {k for k, (a, _) in enumerate(inputs) if copied[training.same[a]]}
                if facts.follows and not tied[x] and not again <= facts.inputs:
                    found.add(x)
        return sorted(found)

    def unread(self, mask: np.ndarray) -> List[int]:
        """The recomputed operators whose first output nobody reads and that do not tolerate it."""
        found: Set[int] = set()
        n = len(self.graph.nodes)
        for training in self.trainings:
            tables = training.tables
            order, reads = order_and_reads(tables, mask)
            copies = order[(order >= n) & (order < 2 * n)]
            silent = copies[reads[tables.output_start[copies]] == 0] - n
            found.update(int(i) for i in silent if not self._tolerant[i])
        return sorted(found)

    def _keep(self, mask: np.ndarray, i: int) -> None:
        for j in self._twins[i]:
            mask[j] = False


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
