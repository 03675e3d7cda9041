"""Memory and recomputation of a training step, computed from its replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Mapping

import numpy as np

from memonger.costs.bind import bind, has_mkldnn, read_planned_mb
from memonger.costs.held import NOTHING, Held, count_device_bytes, count_temporary
from memonger.costs.replay import Replay, Timeline, replay
from memonger.costs.time.flops import count_forward_flops
from memonger.graph import marks
from memonger.graph.arrays import FORWARD, RECOMPUTED
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.recompute import GPU
from memonger.graph.read import forward_graph
from memonger.graph.training import TrainingGraph, training_graph
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.schedules.expand import step_for
from memonger.schedules.training_step import Placed, TrainingStep
from memonger.solve.limits import Budget
from memonger.solve.network import Network
from memonger.support.allocator import trim_heap
from memonger.support.errors import MB
from memonger.support.types import Bools, Int64s, Symbol


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of a training step of a network, with its marks or its schedule."""

    replay: Replay
    #: The pool that MXNet reports after a bind, in whole MiB rounded down; without a bind the
    #: replay's.
    bound: int
    inexact: tuple[str, ...]  # why the replay may differ from MXNet
    held: Held = NOTHING  # memory of operators, beside the pool

    @property
    def why_inexact(self) -> str:
        """Why the replay is not exact; empty if it is."""
        replayed = self.replay.pool_bytes // MB
        differs = f"memonger predicts {replayed} MiB and MXNet plans {self.bound} MiB"
        return "; ".join(self.inexact) or (differs if replayed != self.bound else "")

    @property
    def exact(self) -> bool:
        return not self.why_inexact

    @property
    def counted_bytes(self) -> int:
        """The pool in bytes as MXNet counts it: 4 bytes an element.

        Where the replay differs, it is the nearest number of bytes that rounds down to the MiB that
        MXNet reports.
        """
        return min(max(self.replay.pool_bytes, self.bound * MB), self.bound * MB + MB - 1)

    @cached_property
    def pool_bytes(self) -> int:
        """The pool in bytes with the real size of elements; scaled if the replay is not exact."""
        real, planned = self.replay.allocated_bytes, max(1, self.replay.pool_bytes)
        return round(self.counted_bytes * real / planned)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes of the pool that are alive at once.

        They are at most ``pool_bytes``, because a replay that is not exact may hold more than
        MXNet's pool.
        """
        return min(int(self.live.max(initial=0)), self.pool_bytes)

    @cached_property
    def device_bytes(self) -> int:
        """The bytes of the device: the pool, the arrays of the bind, and what operators hold."""
        return self._count_device_bytes(self.pool_bytes, self.temporary_bytes)

    @property
    def beside_bytes(self) -> int:
        """The bytes of the device beside the pool that all plans take."""
        return self._count_device_bytes(0, self.held.temporary)

    @cached_property
    def temporary_bytes(self) -> int:
        """The bytes of the temporary spaces of operators."""
        return count_temporary(self.replay, self.held, isinstance(self.replay, Placed))

    @property
    def judged_bytes(self) -> int:
        """The bytes that a plan changes: of the pool, and of temporary space on a CPU."""
        return self.pool_bytes + self.temporary_bytes - self.held.temporary

    def _count_device_bytes(self, pool_bytes: int, temporary: int) -> int:
        t, signatures = self.training.arrays, self.training.signatures
        heads = zip(t.head_row[t.outputs :], t.head_output[t.outputs :])
        gradients = [signatures[row].tensors[k] for row, k in heads]
        return count_device_bytes(self.replay, gradients, self.held, temporary, pool_bytes)

    def count_saved(self, unplanned: Memory) -> int:
        """Return how many bytes of the pool a plan saves, given the memory without a plan."""
        return unplanned.pool_bytes - self.pool_bytes

    @property
    def training(self) -> TrainingGraph:
        """The training graph without a schedule."""
        step = self.replay.training
        graph = step.training if isinstance(step, TrainingStep) else step
        assert isinstance(graph, TrainingGraph)
        return graph

    @property
    def graph(self) -> ForwardGraph:
        return self.training.graph

    @property
    def operators(self) -> Int64s:
        """The forward node that each row runs, recomputes or is a gradient of; -1 for none."""
        return self.replay.training.origin

    def find_places(self, phase: int) -> Int64s:
        """Find the positions in the order at which operators run in a phase, such as RECOMPUTED."""
        order = self.replay.order
        phases = self.replay.training.phases[order]
        return np.flatnonzero((phases == phase) & (self.operators[order] >= 0))

    @cached_property
    def recomputed(self) -> Int64s:
        """The operators that are recomputed, in order; once for each time."""
        return self.operators[self.replay.order[self.find_places(RECOMPUTED)]]

    @cached_property
    def node_flops(self) -> Int64s:
        """The FLOPs of each forward node."""
        return count_forward_flops(self.graph)

    @cached_property
    def forward_flops(self) -> float:
        """The FLOPs of the forward pass, at least 1."""
        run = self.operators[self.replay.order[self.find_places(FORWARD)]]
        return max(1.0, float(self.node_flops[run].sum()))

    @property
    def recomputed_flops(self) -> float:
        """The FLOPs of recomputation, as a share of those of the forward pass."""
        return float(self.node_flops[self.recomputed].sum() / self.forward_flops)

    @cached_property
    def timeline(self) -> Timeline:
        return self.replay.timeline()

    @cached_property
    def live(self) -> Int64s:
        """Bytes alive while each row runs, by its position in the order."""
        return self.timeline.live_bytes()

    @property
    def peak(self) -> int:
        """The position in the order at which most bytes are alive."""
        return int(np.argmax(self.live))

    @property
    def running(self) -> str:
        """A description of the row at the peak."""
        return self.replay.training.describe(int(self.replay.order[self.peak]))


def predict_marks(training: TrainingGraph, mask: Bools, held: Held = NOTHING) -> Memory:
    """Predict the memory of a network with these operators marked, without pointwise fusion."""
    replayed = replay(training, mask)
    return Memory(replayed, replayed.pool_bytes // MB, training.inexact, held)


def predict_step(step: TrainingStep, held: Held = NOTHING) -> Memory:
    """Predict the memory of a schedule's training step: its arena and its outputs."""
    placed = step.plan_memory()
    return Memory(placed, placed.pool_bytes // MB, (), held)


def predict(network: Network) -> Memory:
    """Predict the memory of a network with the marks or the schedule that it carries."""
    symbol, grad_req = network.symbol, network.grad_req
    graph = forward_graph(symbol, network.spec)
    if isinstance(symbol, ScheduledSymbol) and symbol.schedule is not None:
        mkldnn = network.device_type != GPU and has_mkldnn(network.device)
        return predict_step(step_for(graph, symbol.schedule, grad_req, mkldnn))
    training = training_graph(graph, find_wanted(graph, grad_req))
    return predict_marks(training, marks.read_mask(graph))


def measure(network: Network) -> Memory:
    """Predict the memory of a network as `predict` does, and confirm it by a bind."""
    return confirm(predict(network), network.symbol, network)


def confirm(memory: Memory, symbol: Symbol, network: Network) -> Memory:
    """Bind a symbol whose memory was predicted, and return the memory with MXNet's own total."""
    if isinstance(memory.replay, Placed):  # MXNet does not plan an arena
        return memory
    wanted = memory.training.wanted
    with trim_heap():
        executor = bind(symbol, memory.graph, network.device, wanted, network.grad_req)
        total = read_planned_mb(executor)
    return replace(memory, bound=total)


def find_wanted(graph: ForwardGraph, grad_req: Mapping[str, str]) -> tuple[int, ...]:
    """Find the arguments (nodes) that get a gradient."""
    return tuple(a for a in graph.arguments if grad_req[graph.nodes[a].name] != "null")


def count_state_bytes(budget: Budget, graph: ForwardGraph, network: Network) -> int:
    """Count the bytes of the optimizer's state, which a budget of the device includes."""
    wanted, inputs = find_wanted(graph, network.grad_req), network.spec.shapes
    # Gluon and ``bind`` give the shapes of parameters too.
    learned = [a for a in wanted if graph.nodes[a].name not in inputs] or wanted
    return round(budget.state * sum(graph.tensors[a][0].elements for a in learned))
