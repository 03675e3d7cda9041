"""The memory of a training step: which tensors share a block, when they are alive, and bytes.

Two planners make it: `costs.pool.pool` as MXNet's executor does, and `training_step.arena` for the
schedules of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memonger.costs.held import FROM_HEAP, NOTHING, Held, round_for_gpu
from memonger.costs.layouts import count_copies
from memonger.graph.arrays import FORWARD, RECOMPUTED, Step, find_owners
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.recompute import GPU
from memonger.graph.training import StepGraph, TrainingGraph
from memonger.support.errors import MB
from memonger.support.types import Bools, Int32s, Int64s


@dataclass(frozen=True, eq=False)
class Usage:
    """The memory of one training step of a network, with its marks or its schedule.

    A *run* is a position in ``ran.order``. A *tensor* is an output in the pool, as it is computed
    once; tensors have the order of their starts.
    """

    step: StepGraph
    ran: Step  # the rows of the step that run, in execution order, and what they read
    planned: Int32s  # (entries,): as ``block``, before gradients are added to others in place
    block: Int32s  # (entries,): the block of each entry; negative: none
    pooled: Bools  # (blocks,): whether the block is in the pool, and no array of the caller
    allocated: Int64s  # (arrays,): the bytes of each array of the pool, with real sizes of elements
    planned_bytes: int  # of the pool, as MXNet's planner counts: 4 bytes an element
    #: The pool that MXNet reports after a bind, in whole MiB rounded down; without a bind that of
    #: ``planned_bytes``.
    bound: int
    inexact: tuple[str, ...] = ()  # why the planner may differ from MXNet's
    held: Held = NOTHING  # memory of operators, beside the pool
    is_arena: bool = False  # whether the pool is an arena, and the operators are imperative

    @property
    def why_inexact(self) -> str:
        """Why the bytes are not exact; empty if they are."""
        planned = self.planned_bytes // MB
        differs = f"memonger predicts {planned} MiB and MXNet plans {self.bound} MiB"
        return "; ".join(self.inexact) or (differs if planned != self.bound else "")

    @property
    def exact(self) -> bool:
        return not self.why_inexact

    @property
    def counted_bytes(self) -> int:
        """The pool in bytes as MXNet counts it: 4 bytes an element.

        Where ``planned_bytes`` differs, it is the nearest number of bytes that rounds down to the
        MiB that MXNet reports.
        """
        return min(max(self.planned_bytes, self.bound * MB), self.bound * MB + MB - 1)

    @cached_property
    def pool_bytes(self) -> int:
        """The pool in bytes with the real size of elements; scaled if it is not exact."""
        real, planned = int(self.allocated.sum()), max(1, self.planned_bytes)
        return round(self.counted_bytes * real / planned)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes of the pool that are alive at once.

        They are at most ``pool_bytes``, because what is not exact may hold more than MXNet's pool.
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

    def _count_device_bytes(self, pool_bytes: int, temporary: int) -> int:
        """Count the bytes that a training step takes on a device.

        They are the pool, variables, gradients (which have arrays of their own), what operators
        hold, and their ``temporary`` space. If ``pool_bytes`` differs from ``allocated``, all its
        arrays are scaled by one factor.
        """
        pool, held = self.allocated, self.held
        if pool_bytes != pool.sum():
            pool = np.ceil(pool * (pool_bytes / max(1, pool.sum()))).astype(np.int64)
        t, signatures = self.training.arrays, self.training.signatures
        heads = zip(t.head_row[t.outputs :], t.head_output[t.outputs :])
        others = [signatures[row].tensors[k].nbytes for row, k in heads]
        t = self.step.arrays
        variables = t.output_start[self.ran.order[t.variable[self.ran.order]]]
        others += [*held.arrays, temporary]
        nbytes = np.concatenate([pool, t.elements[variables] * t.itemsize[variables], others])
        return int((round_for_gpu(nbytes) if held.device_type == GPU else nbytes).sum())

    @cached_property
    def temporary_bytes(self) -> int:
        """The bytes of the temporary spaces of operators.

        They depend on the plan, where MKLDNN copies. Imperative operators take turns at
        ``held.spaces``. The number of requests in a step is hardly ever a multiple of that of
        spaces, so in time each space gets the largest request.
        """
        held, used, own = self.held, 0, 0
        if held.mkldnn:
            used, own = count_copies(self.step, self.ran, self.planned, self.block)
        # MKLDNN's operators request twice what the largest has used so far (``TmpMemMgr::Init`` in
        # ``src/operator/nn/mkldnn/mkldnn_base-inl.h``), so that half of it is never written.
        largest = max(held.temporary, 2 * used if 2 * used < FROM_HEAP else used)
        return (held.spaces if self.is_arena else 1) * largest + own

    @property
    def judged_bytes(self) -> int:
        """The bytes that a plan changes: of the pool, and of temporary space on a CPU."""
        return self.pool_bytes + self.temporary_bytes - self.held.temporary

    @property
    def training(self) -> TrainingGraph:
        """The training graph without a schedule."""
        return self.step.training

    @property
    def graph(self) -> ForwardGraph:
        return self.step.graph

    @property
    def operators(self) -> Int64s:
        """The forward node that each row runs, recomputes or is a gradient of; -1 for none."""
        return self.step.origin

    def find_places(self, phase: int) -> Int64s:
        """Find the runs of operators in a phase, such as RECOMPUTED."""
        phases = self.step.phases[self.ran.order]
        return np.flatnonzero((phases == phase) & (self.operators[self.ran.order] >= 0))

    @cached_property
    def recomputed(self) -> Int64s:
        """The operators that are recomputed, in order; once for each time."""
        return self.operators[self.ran.order[self.find_places(RECOMPUTED)]]

    @cached_property
    def forward_flops(self) -> float:
        """The FLOPs of the forward pass, at least 1."""
        run = self.operators[self.ran.order[self.find_places(FORWARD)]]
        return max(1.0, float(self.graph.flops[run].sum()))

    @property
    def recomputed_flops(self) -> float:
        """The FLOPs of recomputation, as a share of those of the forward pass."""
        return float(self.graph.flops[self.recomputed].sum() / self.forward_flops)

    @cached_property
    def _lives(self) -> tuple[Int64s, Int64s, Int64s]:
        """The entry of each tensor, and the first and the last run in which it is alive."""
        t, order = self.step.arrays, self.ran.order
        run_of_row = np.full(len(t.variable), -1)
        run_of_row[order] = np.arange(len(order))
        birth, reader = (np.repeat(run_of_row, np.diff(s)) for s in (t.output_start, t.read_start))
        last = birth.copy()  # the run of the last reader of each entry
        held = t.read_holds & (reader >= 0)
        np.maximum.at(last, self.ran.entry[held], reader[held])
        last[t.head_entry[: t.outputs]] = len(order) - 1
        entries = np.flatnonzero(self.block >= 0)
        entries = entries[self.pooled[self.block[entries]]]
        entries = entries[np.lexsort((entries, birth[entries]))]
        # Tensors of one block, in order: the next is computed in place of those that are alive, or
        # the block was free. The offset keeps blocks apart.
        line = np.argsort(self.block[entries], kind="stable")
        start, block = birth[entries], self.block[entries][line].astype(np.int64)
        offset = block * len(order)
        alive = np.maximum.accumulate(offset + last[entries][line])
        in_place = alive[:-1] >= (offset + start[line])[1:]
        chain = np.cumsum(np.append(True, ~in_place)[: len(line)]) - 1
        stop = np.zeros_like(start)
        death = np.full(chain.max(initial=-1) + 1, -1)
        np.maximum.at(death, chain, last[entries][line])
        stop[line] = death[chain]
        stop[line[:-1][in_place]] = start[line[1:][in_place]] - 1
        return entries, start, stop

    @cached_property
    def row(self) -> Int64s:
        """The row of the step that computes each tensor, (tensors,)."""
        return find_owners(self.step.arrays.output_start)[self._lives[0]]

    @cached_property
    def output(self) -> Int64s:
        """Which output of its row each tensor is, (tensors,)."""
        return self._lives[0] - self.step.arrays.output_start[self.row]

    @cached_property
    def kind(self) -> Int64s:
        """The phase of each tensor's row, (tensors,): FORWARD, RECOMPUTED or BACKWARD."""
        return self.step.phases[self.row]

    @cached_property
    def nbytes(self) -> Int64s:
        """The bytes of each tensor with the real size of its elements, (tensors,)."""
        t = self.step.arrays
        return (t.elements * t.itemsize)[self._lives[0]]

    @property
    def start(self) -> Int64s:
        """The first run in which each tensor is alive, (tensors,)."""
        return self._lives[1]

    @property
    def stop(self) -> Int64s:
        """The last run of each tensor, (tensors,): before another is computed in its place."""
        return self._lives[2]

    def count_live(self, *kinds: int) -> Int64s:
        """Count the bytes alive in each run, (runs,), of these kinds of tensors (or of all)."""
        nbytes = self.nbytes * np.isin(self.kind, kinds) if kinds else self.nbytes
        births = np.bincount(self.start, nbytes, len(self.ran.order) + 1)
        deaths = np.bincount(self.stop + 1, nbytes, len(self.ran.order) + 1)
        return np.cumsum(births - deaths)[:-1].astype(np.int64)

    @cached_property
    def live(self) -> Int64s:
        """The bytes alive in each run, (runs,)."""
        return self.count_live()

    @property
    def peak(self) -> int:
        """The run in which most bytes are alive."""
        return int(np.argmax(self.live))

    @property
    def running(self) -> str:
        """A description of the row at the peak."""
        return self.step.describe(int(self.ran.order[self.peak]))
