"""What a network takes in training: replayed, and bound once to make sure of it."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

import numpy as np

from memonger.api.request import wanted
from memonger.costs.allocator import Replay, replay
from memonger.costs.bind import bind, has_mkldnn, planned_mb
from memonger.costs.device import device_bytes
from memonger.costs.fusion import replay_fused
from memonger.costs.held import NOTHING, Held, with_copies
from memonger.costs.model import MB
from memonger.graph import marks
from memonger.graph.forward import Entry, ForwardGraph
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.recompute import GPU_FUSION, targets_of
from memonger.graph.operators.tensors import Tensor
from memonger.graph.read import forward_graph
from memonger.graph.training import TrainingGraph, training_graph
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.schedules.expand import parts, unroll
from memonger.schedules.schedule import adapt, workload
from memonger.schedules.training_step import TrainingStep


class Memory(NamedTuple):
    """What a symbol takes in training: replayed and bound.

    Attributes
    ----------
    replay : Replay
        Operator by operator.
    bound : int
        MXNet's own total, in whole MB rounded down.
    inexact : tuple of str
        Why the replay may be wrong.
    gradients : tuple of Tensor
        Those that are written to arrays of their own.
    pooled : frozenset of (row, output)
        Those that the pool holds, to the end.
    held : Held
        By operators, beside the pool.
    fused : Replay, optional
        The same step as pointwise fusion leaves it, where that is on.
    """

    replay: Replay
    bound: int
    inexact: tuple[str, ...]
    gradients: tuple[Tensor, ...]
    pooled: frozenset[Entry] = frozenset()
    held: Held = NOTHING
    fused: Replay | None = None

    @property
    def planned(self) -> Replay:
        """What MXNet plans the memory of."""
        return self.fused or self.replay

    @property
    def exact(self) -> bool:
        return not self.inexact and self.planned.pool_bytes // MB == self.bound

    @property
    def counted_bytes(self) -> int:
        """The pool as MXNet counts it: 4 bytes to an element, with the gradients in it."""
        return self.planned.pool_bytes if self.exact else self.bound * MB

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients in the pool, with the real size of elements."""
        tables = self.replay.training.tables
        held = [tables.output_start[row] + k for row, k in self.pooled]
        return int((tables.elements * tables.itemsize)[held].sum())

    @property
    def pool_bytes(self) -> int:
        """With the real size of elements; where the replay is not exact, in its proportion."""
        if self.exact:
            return self.planned.allocated_bytes - self.gradient_bytes
        counted, real = self.planned.pool_bytes, self.planned.allocated_bytes
        return round(self.counted_bytes * real / max(1, counted)) - self.gradient_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once of ``pool_bytes``."""
        return int(self.planned.timeline().live_bytes(without=self.pooled).max(initial=0))

    @property
    def device_bytes(self) -> int:
        """Of the device, all that it is bound to and what operators hold included; where the
        replay is not, not exact."""
        pool = self.pool_bytes + self.gradient_bytes
        return device_bytes(self.planned, self.gradients, self.taken, pool)

    @property
    def taken(self) -> Held:
        """By operators, with the copies that they make for MKLDNN."""
        return with_copies(self.held, self.replay)

    def holds_more_than(self, unplanned: Memory) -> bool:
        """Whether it takes more of a CPU, for what operators hold in their own layout."""
        return self.held.in_blocks and self.device_bytes > unplanned.device_bytes

    def saved(self, unplanned: Memory) -> int:
        """Bytes less than without a plan; whole MB unless both are exact."""
        if self.exact and unplanned.exact:
            return unplanned.pool_bytes - self.pool_bytes
        return (unplanned.bound - self.bound) * MB + self.gradient_bytes


def of_marks(
    training: TrainingGraph,
    mask: np.ndarray,
    bound: int,
    held: Held = NOTHING,
    fuses: bool = False,
) -> Memory:
    """Of a network with these operators marked; ``bound`` is MXNet's own total in MB.

    ``fuses`` says whether it is trained with pointwise fusion.
    """
    gradients = tuple(training.graph.tensors[a][0] for a in training.wanted)
    fused = replay_fused(training, mask) if fuses else None
    found = replay(training, mask)
    return Memory(found, bound, training.inexact, gradients, held=held, fused=fused)


def of_step(
    step: TrainingStep, grad_req: Mapping[str, str], bound: int, held: Held = NOTHING
) -> Memory:
    """Of a training step that is written out; ``bound`` is MXNet's own total in MB.

    Gradients that are to be written stay in the pool, but for one that is an output of the network
    too, or the gradient of an argument before; those that are to be added have arrays of their own.
    """
    training, heads = step.training, step.heads
    pooled: set[Entry] = set()
    beside: list[Tensor] = []
    for a, place in zip(training.wanted, step.gradients):
        entry = None if place is None or place < len(training.graph.heads) else heads[place]
        write = grad_req[training.graph.nodes[a].name] == "write"
        if write and entry is not None and entry not in pooled:
            pooled.add(entry)
        elif a not in step.totals:  # those are among the variables
            beside.append(training.graph.tensors[a][0])
    return Memory(step.replay(), bound, step.inexact, tuple(beside), frozenset(pooled), held)


def measure(symbol: Any, spec: InputSpec, grad_req: Mapping[str, str], device: Any) -> Memory:
    """Replay and bind a symbol, with the marks or the schedule that it carries."""
    graph = forward_graph(symbol, spec)
    bound = planned_mb(bind(symbol, graph, device, wanted(graph, grad_req), grad_req))
    return predict(symbol, graph, grad_req, device)._replace(bound=bound)


def predict(symbol: Any, graph: ForwardGraph, grad_req: Mapping[str, str], device: Any) -> Memory:
    """As `measure`, without a bind: MXNet's total is taken to be that of the replay."""
    asked = wanted(graph, grad_req)
    training = training_graph(graph, asked)
    schedule = symbol.schedule if isinstance(symbol, ScheduledSymbol) else None
    if schedule is not None:
        work = workload(training)
        added = [a for a in asked if grad_req[graph.nodes[a].name] == "add"]
        step = unroll(parts(work), adapt(work, schedule), has_mkldnn(device), added)
        found = of_step(step, grad_req, 0)
    else:
        fuses = GPU_FUSION in targets_of(device.device_type)
        found = of_marks(training, marks.recomputed(graph), 0, fuses=fuses)
    return found._replace(bound=found.planned.pool_bytes // MB)
