"""What makes up the memory of a network, as it stands or with a plan; all of it is read off the
replay of one training step."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.lower_bound import lower_bound
from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, FORWARD, KEPT, RECOMPUTED
from memonger.graph.forward import ForwardGraph, no_collection
from memonger.graph.inputs import (
    check_device,
    check_symbol,
    read_grad_req,
    read_shapes,
)
from memonger.graph.operators.recompute import why_kept
from memonger.solve.memory import Memory, predict
from memonger.solve.request import Network
from memonger.solve.solution import NO_OPERATORS, sets_floor
from memonger.support.errors import MB, in_words

SHOWN = 12  # tensors of the peak that are printed
KINDS = {"result": "results", "computed again": "again", "gradient": "gradients"}
SMALL = 1 / 1000  # of the peak: what is not worth computing again
MOST_TRIED = 20_000_000  # tensors x nodes for which it is tried whether a rule keeps them


# -- a network as it stands -------------------------------------------------------------------


class Alive(NamedTuple):
    """A tensor that is alive at the peak.

    It goes by the operator that makes it, with ``[1]`` for its second output and so on. ``kind`` is
    'result', 'computed again' or 'gradient', ``rule`` why its operator must not be computed again.
    """

    name: str
    op: str
    kind: str
    nbytes: int
    rule: str


class Explanation(NamedTuple):
    """What makes up the memory of a training step, in bytes.

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
        What is alive at once under any plan, at least.
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
            share = 100 * sum(chosen) / max(1, self.peak_bytes)
            if chosen:
                text = f"{in_words(sum(chosen))} of the peak ({share:.0f} %)"
                lines.append(f"{title:9} {text}, {len(chosen)} tensors")
        lines += ["", f"{'memory':>10}  {'kind':14}  {'operator':20}  of"]
        for t in self.tensors[:SHOWN]:
            row = f"{in_words(t.nbytes):>10}  {t.kind:14}  {t.op:20}  {t.name}"
            lines.append(row + (f" (never again: {t.rule})" if t.rule else ""))
        rest = [t.nbytes for t in self.tensors[SHOWN:]]
        if rest:
            lines.append(f"{in_words(sum(rest)):>10}  in {len(rest)} more")
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
    shapes : dict or list of mx.io.DataDesc
        Shapes of the inputs, which may be given as keywords too, the batch first.
    type_dict : dict, optional
        Types of inputs by name; float32 where nothing is told.
    grad_req : str, list or dict
        'write', 'add' or 'null' as ``simple_bind`` takes it.
    ctx : mx.Context, optional
        The device; the CPU by default.
    devices : int
        That share the batch; what one of them takes is told.
    **input_shapes
        Shapes of inputs by name: ``data=(32, 3, 224, 224)``.

    Returns
    -------
    Explanation
        Printed it is a table.

    Raises
    ------
    MemongerError
        If something about the network, the shapes or the call is wrong; it says what to do.

    Examples
    --------
    >>> print(memonger.explain(net, {'data': (32, 3, 224, 224)}))
    """
    spec = read_shapes(check_symbol(net), shapes, input_shapes, type_dict, devices)
    requests = read_grad_req(net.list_arguments(), grad_req)
    return _explained(predict(net, spec, requests, check_device(ctx)))


@no_collection()
def _explained(memory: Memory) -> Explanation:
    rows, line = memory.replay.training, memory.timeline
    names, ops = rows.names, rows.ops
    tensors: list[Alive] = []
    for k in memory.alive.tolist():
        row, output, phase = int(line.row[k]), int(line.output[k]), int(line.kind[k])
        if (row, output) in memory.pooled:
            continue
        x = int(memory.operators[row])
        name, op, rule = names[row], ops[row], ""
        if x >= 0:
            node = memory.graph.nodes[x]
            name, op = node.name, node.op
            rule = (why_kept(op, node.attrs) or "") if phase == FORWARD else ""
        kind = {FORWARD: "result", RECOMPUTED: "computed again", BACKWARD: "gradient"}[phase]
        tensors.append(Alive(_tensor_name(name, output), op, kind, int(line.nbytes[k]), rule))
    tensors.sort(key=lambda t: -t.nbytes)
    least = lower_bound(memory.training)
    return Explanation(
        memory.pool_bytes,
        int(memory.live[memory.peak]),
        memory.running,
        tuple(tensors),
        least.nbytes,
        least.own_bytes,
        sets_floor(memory.training, least),
        memory.inexact,
    )


def _tensor_name(name: str, output: int) -> str:
    """An output of an operator of this name; the first goes by the operator's."""
    return f"{name}[{output}]" if output else name


# -- a plan, tensor by tensor -----------------------------------------------------------------


class Choice(NamedTuple):
    """What a plan does with one tensor of the forward pass.

    Attributes
    ----------
    name, op : str
        The operator that makes it; with ``[1]`` its second output, and so on.
    nbytes : int
    choice : str
        'kept' from the forward pass for the backward pass; computed 'again'; or 'freed' in the
        forward pass, for no gradient reads it, or its memory is handed on to what is.
    times : int
        How often its operator runs in a training step.
    why : str
        Why it is kept: 'output' of the network; by a 'rule'; 'mark', where the original's planner
        keeps what the user marked; 'cut', where what follows is computed again from it; 'gradient',
        where that of a kept operator reads it; 'cheap', where it is small or gone before the peak;
        'budget', where the plan is the fastest within one, which allows it; 'search', where no
        smaller plan without it was found. Empty where it is not kept.
    reason : str
        The same in words.
    """

    name: str
    op: str
    nbytes: int
    choice: str
    times: int
    why: str
    reason: str


class PlanExplanation(NamedTuple):
    """What a plan does with each tensor of the forward pass, in execution order."""

    tensors: tuple[Choice, ...]

    def __str__(self) -> str:
        lines = []
        for choice in ("kept", "again", "freed"):
            chosen = [t.nbytes for t in self.tensors if t.choice == choice]
            lines.append(f"{choice:6} {sum(chosen) / MB:10.1f} MB in {len(chosen)} tensors")
        lines += ["", f"{'':6} {'MB':>10}  {'why':9} {'operator':20} tensor"]
        for t in self.tensors:
            line = f"{t.choice:6} {t.nbytes / MB:10.2f}  {t.why:9} {t.op:20} {t.name}"
            lines.append(line + (": " + t.reason if t.reason else ""))
        return "\n".join(lines)


@no_collection()
def explain_choices(
    network: Network, memory: Memory, original: bool, budgeted: bool
) -> PlanExplanation:
    """Explain a plan tensor by tensor: who reads it, and when, and which rule leaves no choice.

    ``original``: it is the original planner's, which keeps by the user's marks; ``budgeted``: it is
    the fastest within a budget, and not the smallest.
    """
    found, line, graph = memory.replay, memory.timeline, memory.graph
    training, n, operators = found.training, len(graph.nodes), memory.operators
    forward = (training.phases == FORWARD) & (operators >= 0) & ~training.tables.variable
    border = int(np.flatnonzero(forward[found.order]).max(initial=0))
    runs = operators[found.order[training.phases[found.order] != BACKWARD]]
    times = np.bincount(runs[runs >= 0], minlength=n)
    readers = _readers(memory)
    kept_by_rule = _kept_by_rule(network, graph, times > 1)
    heads, peak = set(graph.heads), memory.peak
    little = SMALL * int(memory.live[peak])

    def why_of(k: int) -> tuple[str, str]:
        """Why a tensor of the timeline is kept, in a word and in words."""
        row, output = int(line.row[k]), int(line.output[k])
        x = int(operators[row])
        again, gradients = readers.get((row, output), ([], []))
        if (x, output) in heads:
            return "output", "it is an output of the network"
        if x in kept_by_rule:
            return "rule", kept_by_rule[x]
        if again:
            reason = f"{_some(graph, again, 'is', 'are')} computed again from it"
            return "mark" if original else "cut", reason
        if times[x] > 1:
            return "gradient", f"the gradient of {_some(graph, gradients)} reads it"
        if line.nbytes[k] <= little:
            return "cheap", "less than 1/1000 of the peak"
        if not line.start[k] <= peak <= line.stop[k]:
            return "cheap", "it is gone at the peak"
        if budgeted:
            return "budget", "the budget allows it, and computing it again takes time"
        return "search", "no smaller plan was found that computes it again"

    tensors: list[Choice] = []
    for k in np.flatnonzero((line.kind == FORWARD) & forward[line.row]).tolist():
        output, x = int(line.output[k]), int(operators[line.row[k]])
        why = reason = ""
        if line.start[k] <= border < line.stop[k]:
            choice = "kept"
            why, reason = why_of(k)
        else:
            choice = "again" if times[x] > 1 else "freed"
        name = _tensor_name(graph.nodes[x].name, output)
        op, nbytes = graph.nodes[x].op, int(line.nbytes[k])
        tensors.append(Choice(name, op, nbytes, choice, int(times[x]), why, reason))
    return PlanExplanation(tuple(tensors))


def _some(graph: ForwardGraph, nodes: Sequence[int], one: str = "", more: str = "") -> str:
    """Some nodes by name: the first, and how many others."""
    if not nodes:
        return "a kept operator"
    text = repr(graph.nodes[nodes[0]].name)
    others = f"and {len(nodes) - 1} more {more}" if len(nodes) > 1 else one
    return f"{text} {others}".rstrip()


def _readers(memory: Memory) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Of each tensor the operators that read it when computed again, and by their gradients."""
    found = memory.replay
    t, again, phases = found.training.tables, found.recomputed, found.training.phases
    copies = int(t.output_start[t.forward])
    maker = np.repeat(np.arange(len(t.variable)), np.diff(t.output_start))
    of: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for row in found.order.tolist():
        phase, x = int(phases[row]), int(memory.operators[row])
        if phase == FORWARD or x < 0:
            continue
        for j in range(t.use_start[row], t.use_start[row + 1]):
            entry, owner = int(t.use_entry[j]), int(t.use_owner[j])
            if owner != KEPT and again[owner] and again[t.use_row[j]]:
                entry += copies
            made = int(maker[entry])
            lists = of.setdefault((made, entry - int(t.output_start[made])), ([], []))
            into = lists[0] if phase == RECOMPUTED else lists[1]
            if x not in into:
                into.append(x)
    return of


def _kept_by_rule(network: Network, graph: ForwardGraph, again: np.ndarray) -> dict[int, str]:
    """Of the nodes that a rule keeps, which one.

    Those that must run once are known. For the others it is tried: recomputed beside what is
    recomputed already (``again``), do the rules leave them so? ``graph`` is the network's with the
    plan, which may hold kept copies.
    """
    ours = np.array([n.hidden.get(marks.RECORD) == marks.INSERTED for n in graph.nodes], dtype=bool)
    rules, before = network.rules, np.where(ours, -1, np.cumsum(~ours) - 1)  # without copies
    found = {i: rules.reasons[x] for i, x in enumerate(before.tolist()) if x in rules.reasons}
    until = network.request.until
    if until is not None:
        late = f"it does not come before {network.graph.nodes[until].name!r}"
        for i in np.flatnonzero(before >= until).tolist():
            if not graph.nodes[i].is_variable:
                found.setdefault(i, late)
    mask = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    mask[before[(before >= 0) & again]] = True
    tried = np.flatnonzero((before >= 0) & ~again & rules.allowed[before])
    candidates = [i for i in tried.tolist() if i not in found]
    if not mask.any() or len(candidates) * len(before) > MOST_TRIED:
        return found
    same = rules.trainings[0].same
    for i in candidates:
        x = int(before[i])
        more = mask.copy()
        more[x] = True
        if rules.apply(more)[x]:
            continue
        twin = next((y for y, first in enumerate(same) if first == same[x] and y != x), None)
        if twin is None:
            found[i] = "nobody would read what is computed again, which not every device bears"
        else:
            found[i] = (
                f"MXNet merges it with {network.graph.nodes[twin].name!r}, which has the same "
                "marks therefore"
            )
    return found
