"""Why a network needs the memory that it needs, with its marks or its schedule if it has any.

All of it is read off the replay of one training step (``allocator.Timeline``): what is alive when,
and what runs then. Nothing is bound.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

import numpy as np

from memonger.api.memory import Memory, predict
from memonger.api.request import Network
from memonger.costs.allocator import Replay, Timeline
from memonger.costs.lower_bound import Floor, floor
from memonger.costs.time.flops import forward_flops
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.graph.forward import ForwardGraph, no_collection
from memonger.graph.inputs import InputSpec, check_device, check_symbol, read_grad_req, read_shapes
from memonger.graph.operators.recompute import why_kept
from memonger.graph.read import forward_graph
from memonger.graph.training import TrainingGraph
from memonger.schedules.nodes import ITSELF, MASKED
from memonger.schedules.training_step import TrainingStep
from memonger.support.errors import in_words

SHOWN = 12  # tensors of the peak that are printed
KINDS = {"result": "results", "computed again": "again", "gradient": "gradients"}


class Step(NamedTuple):
    """One training step of a network as it stands, with its marks or its schedule.

    Attributes
    ----------
    memory : Memory
    operator : np.ndarray of int
        For each row of the training graph the operator (a forward node) that it is, is computed
        again, or whose gradient it is; -1 for sums of gradients and the like.
    timeline : Timeline
    live : np.ndarray of int
        Bytes alive while each row runs, by its place in the order (``Replay.order``), without the
        gradients that a schedule's pool holds.
    """

    memory: Memory
    operator: np.ndarray
    timeline: Timeline
    live: np.ndarray

    @classmethod
    def of(cls, memory: Memory) -> Step:
        """The training step that was replayed to learn what it takes."""
        line = memory.replay.timeline()
        return cls(
            memory, operators_of(memory.replay), line, line.live_bytes(without=memory.pooled)
        )

    @property
    def graph(self) -> ForwardGraph:
        return self.memory.replay.training.graph

    @property
    def peak(self) -> int:
        """The place at which the most is alive."""
        return int(np.argmax(self.live))

    @property
    def alive(self) -> np.ndarray:
        """The tensors of the timeline that are alive there."""
        line, peak = self.timeline, self.peak
        return np.flatnonzero((line.start <= peak) & (line.stop >= peak))

    @property
    def running(self) -> str:
        """What runs there, in words."""
        row = int(self.memory.replay.order[self.peak])
        training, x = self.memory.replay.training, int(self.operator[row])
        if x < 0:
            return f"{training.names[row]!r} ({training.ops[row]})"
        how = {FORWARD: "%r (%s)", RECOMPUTED: "%r (%s) again", BACKWARD: "the gradient of %r (%s)"}
        node = self.graph.nodes[x]
        return how[int(training.phases[row])] % (node.name, node.op)


@no_collection()
def step_of(symbol: Any, spec: InputSpec, grad_req: Mapping[str, str], device: Any) -> Step:
    """Replay a training step of a symbol, with the marks or the schedule that it carries."""
    return Step.of(predict(symbol, forward_graph(symbol, spec), grad_req, device))


def operators_of(found: Replay) -> np.ndarray:
    """For each row the operator that it is part of (see `Step`)."""
    training: Any = found.training
    if not isinstance(training, TrainingStep):
        return _of_rows(training)
    rows = training.rows
    own = (rows.what == ITSELF) | (rows.what == MASKED)
    return np.where(own, _of_rows(training.training)[np.where(own, rows.source, 0)], -1)


def _of_rows(training: TrainingGraph) -> np.ndarray:
    operators = np.arange(len(training.graph.nodes))
    return np.concatenate([operators, operators, training.owners])


def tensor_name(name: str, output: int) -> str:
    """An output of an operator of this name; the first goes by the operator's."""
    return "%s[%d]" % (name, output) if output else name


class Segment(NamedTuple):
    """Operators that are computed again one after the other, with no gradient between.

    Attributes
    ----------
    first, last : int
        Nodes.
    operators : int
        How many there are.
    flops : float
        Their work, as a share of that of the forward pass.
    """

    first: int
    last: int
    operators: int
    flops: float

    def before(self, moved: np.ndarray) -> Segment:
        """The same in the network without kept copies; ``moved`` is its nodes' new indices."""
        first, last = np.searchsorted(moved, [self.first, self.last], side="right") - 1
        return self._replace(first=int(first), last=int(last))


def slowest_segment(found: Replay) -> Segment | None:
    """The most work that is done again at once; None where nothing is."""
    operator = operators_of(found)[found.order]
    phase = found.training.phases[found.order]
    each = forward_flops(found.training.graph)
    again = np.flatnonzero((phase == RECOMPUTED) & (operator >= 0))
    if not len(again):
        return None
    gradients = np.cumsum(phase == BACKWARD)[again]  # that have run before
    _, start = np.unique(gradients, return_index=True)
    work = np.add.reduceat(each[operator[again]], start)
    count = np.diff(np.append(start, len(again)))
    k = int(np.lexsort((count, work))[-1])
    nodes = operator[again[start[k] : start[k] + count[k]]]
    total = each[operator[(phase == FORWARD) & (operator >= 0)]].sum()
    return Segment(int(nodes[0]), int(nodes[-1]), len(nodes), float(work[k] / max(1.0, total)))


# -- a network --------------------------------------------------------------------------------


NO_OPERATORS = "the network has no operators, so nothing is held for a backward pass"


class Alive(NamedTuple):
    """A tensor that is alive at the peak.

    Attributes
    ----------
    name : str
        The operator that makes it; with ``[1]`` its second output, and so on.
    op : str
    kind : str
        'result', 'computed again' or 'gradient'.
    nbytes : int
    rule : str
        Why its operator must not be computed again; empty where it may be.
    """

    name: str
    op: str
    kind: str
    nbytes: int
    rule: str


class Explanation(NamedTuple):
    """What makes up the memory of a training step.

    All but ``pool_bytes`` is told operator by operator, as if pointwise fusion were off.

    Attributes
    ----------
    pool_bytes : int
        What MXNet's memory pool takes.
    peak_bytes : int
        The most of it that is alive at once.
    peak : str
        What runs then.
    tensors : tuple of Alive
        Those that are alive then, the largest first.
    floor_bytes : int
        What no plan can do without (``bounds``).
    floor_own_bytes : int
        What the operator that sets it needs itself; the others are held over it.
    floor : str
        The operator that sets it.
    inexact : tuple of str
        Why the replay that this was read off may be wrong; empty if it should not.
    """

    pool_bytes: int
    peak_bytes: int
    peak: str
    tensors: tuple[Alive, ...]
    floor_bytes: int
    floor_own_bytes: int
    floor: str
    inexact: tuple[str, ...]

    @property
    def bounded_by(self) -> str:
        """What bounds the memory of any plan from below, in words."""
        ruled = sum(t.nbytes for t in self.tensors if t.rule)
        text = f"{self.floor or 'nothing'} needs {in_words(self.floor_own_bytes)} at once"
        over = self.floor_bytes - self.floor_own_bytes
        if over:
            text += f", and {in_words(over)} that cannot be computed again are held over it"
        if ruled:
            text += f"; {in_words(ruled)} of the peak must not be computed again"
        return text

    def __str__(self) -> str:
        if not self.tensors and not self.pool_bytes:
            return NO_OPERATORS
        lines = [
            "pool      " + in_words(self.pool_bytes),
            f"peak      {in_words(self.peak_bytes)} alive at once, in {self.peak}",
            f"floor     {in_words(self.floor_bytes)}: {self.bounded_by}",
        ]
        for kind, title in KINDS.items():
            chosen = [t.nbytes for t in self.tensors if t.kind == kind]
            if chosen:
                share = 100 * sum(chosen) / max(1, self.peak_bytes)
                lines.append(
                    f"{title:9} {in_words(sum(chosen))} of the peak ({share:.0f} %), "
                    f"{len(chosen)} tensors"
                )
        lines += ["", "%10s  %-14s  %-20s  %s" % ("memory", "kind", "operator", "of")]
        for t in self.tensors[:SHOWN]:
            row = "%10s  %-14s  %-20s  %s" % (in_words(t.nbytes), t.kind, t.op, t.name)
            lines.append(row + (f" (never again: {t.rule})" if t.rule else ""))
        rest = [t.nbytes for t in self.tensors[SHOWN:]]
        if rest:
            lines.append("%10s  in %d more" % (in_words(sum(rest)), len(rest)))
        return "\n".join(lines)


def explain(
    net: Any,
    shapes: Any = None,
    *,
    type_dict: Mapping[str, Any] | None = None,
    grad_req: Any = "write",
    ctx: Any = None,
    devices: int = 1,
    **input_shapes: Any,
) -> Explanation:
    """Tell which tensors make up the memory of a training step, and what no plan can do without.

    Parameters
    ----------
    net : mx.sym.Symbol
        A network as it stands: one that is planned already is explained with its plan.
    shapes, type_dict, grad_req, ctx, devices, **input_shapes
        As for ``memonger.plan``.

    Returns
    -------
    Explanation

    Examples
    --------
    >>> print(memonger.explain(net, {'data': (32, 3, 224, 224)}))
    """
    spec = read_shapes(check_symbol(net), shapes, input_shapes, type_dict, devices)
    requests = read_grad_req(net.list_arguments(), grad_req)
    return explained(step_of(net, spec, requests, check_device(ctx)))


def explained(step: Step) -> Explanation:
    """The Explanation of a training step."""
    training, line = step.memory.replay.training, step.timeline
    tensors: list[Alive] = []
    for k in step.alive.tolist():
        row, output, phase = int(line.row[k]), int(line.output[k]), int(line.kind[k])
        if (row, output) in step.memory.pooled:
            continue
        x = int(step.operator[row])
        name, op, rule = training.names[row], training.ops[row], ""
        if x >= 0:
            node = step.graph.nodes[x]
            name, op = node.name, node.op
            rule = (why_kept(op, node.attrs) or "") if phase == FORWARD else ""
        kind = {FORWARD: "result", RECOMPUTED: "computed again", BACKWARD: "gradient"}[phase]
        tensors.append(Alive(tensor_name(name, output), op, kind, int(line.nbytes[k]), rule))
    tensors.sort(key=lambda t: -t.nbytes)
    plain: Any = training.training if isinstance(training, TrainingStep) else training
    least = floor(plain)
    return Explanation(
        step.memory.pool_bytes,
        int(step.live[step.peak]),
        step.running,
        tuple(tensors),
        least.nbytes,
        least.own_bytes,
        floor_text(plain, least),
        step.memory.inexact,
    )


def floor_text(training: TrainingGraph, least: Floor) -> str:
    """What sets the floor, in words; empty if nothing does."""
    if least.operator < 0:
        return ""
    nodes = training.graph.nodes
    return least.sets(nodes[least.operator].name, nodes[least.operator].op, len(nodes))


def where_it_peaks(memory: Memory) -> str:
    """Where the most of a plan is alive, as a sentence."""
    step = Step.of(memory)
    most = int(step.live[step.peak])
    return f"Its peak of {in_words(most)} is in {step.running}. " if most else ""


def why_not_less(network: Network, pool_bytes: float) -> str:
    """What no plan can do without, as a sentence; ``pool_bytes`` is the least that was found.

    Empty if that is less: a schedule's results may lie where a gradient will be, which is not
    counted twice.
    """
    least = floor(network.training, bare=network.rules.bare)
    if least.operator < 0 or least.nbytes > pool_bytes:
        return ""
    return (
        f"No plan can do with less than {in_words(least.nbytes)} alive at once, for "
        f"{floor_text(network.training, least)} needs them."
    )


def held_by_rule(memory: Memory, reasons: Mapping[int, str]) -> dict[int, int]:
    """Bytes at the peak of what must not be computed again, for each such operator (node)."""
    step = Step.of(memory)
    line = step.timeline
    there = step.alive[line.kind[step.alive] == FORWARD]
    held: dict[int, int] = {}
    for x, nbytes in zip(step.operator[line.row[there]].tolist(), line.nbytes[there].tolist()):
        if x in reasons:
            held[x] = held.get(x, 0) + nbytes
    return held
