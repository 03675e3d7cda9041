"""What makes up the memory of a network, as it stands or with a plan; all of it is read off the
replay of one training step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterable, Mapping, NamedTuple

import numpy as np

from memonger.api.docstrings import documented
from memonger.costs.lower_bound import lower_bound
from memonger.costs.replay import entries_read
from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.graph.forward import ForwardGraph, no_collection
from memonger.graph.operators.recompute import why_kept
from memonger.solve.memory import Memory, measure, predict
from memonger.solve.request import read_call
from memonger.solve.solution import NO_OPERATORS
from memonger.support.errors import MB, in_words

SHOWN = 12  # tensors of the peak that are printed
KINDS = {FORWARD: "result", RECOMPUTED: "computed again", BACKWARD: "gradient"}
TITLES = {"result": "results", "computed again": "recomputed", "gradient": "gradients"}
SMALL = 1 / 1000  # of the peak: what is not worth computing again


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
    peak_bytes, peak : int, str
        The most of it that is alive at once, and what runs then.
    tensors : tuple of Alive
        Those that are alive then, the largest first.
    floor_bytes, floor_own_bytes, floor : int, int, str
        What is alive at once under any plan, at least; what the operator that sets this needs
        itself, for the others are held over it; and that operator.
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
            text += f", beside {in_words(over)} that cannot be recomputed"
        if ruled:
            text += f"; {in_words(ruled)} of the peak must not be recomputed"
        return text

    def __str__(self) -> str:
        if not self.tensors and not self.pool_bytes:
            return NO_OPERATORS
        lines = [
            "pool       " + in_words(self.pool_bytes),
            f"peak       {in_words(self.peak_bytes)} alive at once, in {self.peak}",
            f"floor      {in_words(self.floor_bytes)}: {self.bounded_by}",
        ]
        for kind, title in TITLES.items():
            chosen = [t.nbytes for t in self.tensors if t.kind == kind]
            if chosen:
                share = f"{100 * sum(chosen) / max(1, self.peak_bytes):.0f} %"
                text = f"{in_words(sum(chosen))} of the peak ({share}), {len(chosen)} tensors"
                lines.append(f"{title:10} {text}")
        lines += ["", f"{'memory':>10}  {'kind':14}  {'operator':20}  of"]
        for t in self.tensors[:SHOWN]:
            row = f"{in_words(t.nbytes):>10}  {t.kind:14}  {t.op:20}  {t.name}"
            lines.append(row + (f" (never recomputed: {t.rule})" if t.rule else ""))
        rest = [t.nbytes for t in self.tensors[SHOWN:]]
        if rest:
            lines.append(f"{in_words(sum(rest)):>10}  in {len(rest)} more")
        return "\n".join(lines)


@documented
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
    grad_req : str, list or dict
        'write', 'add' or 'null' as ``simple_bind`` takes it.
    ctx : mx.Context, optional
        The device; the CPU by default.
    devices : int
        That share the batch; what one of them takes is told.

    Returns
    -------
    Explanation
        Printed it is a table.

    Examples
    --------
    >>> print(memonger.explain(net, {'data': (32, 3, 224, 224)}))
    """
    call = read_call(locals())
    memory = predict(call)
    return _explained(measure(call) if memory.inexact else memory)


@no_collection()
def _explained(memory: Memory) -> Explanation:
    """Read the tensors of the peak off a replay."""
    line, nodes = memory.timeline, memory.graph.nodes
    tensors: list[Alive] = []
    for k in memory.alive.tolist():
        row, output = int(line.row[k]), int(line.output[k])
        if (row, output) in memory.pooled:
            continue
        (name, op, phase), x = memory.what(row), int(memory.operators[row])
        rule = why_kept(op, nodes[x].attrs) if x >= 0 and phase == FORWARD else None
        name, nbytes = _tensor_name(name, output), int(line.nbytes[k])
        tensors.append(Alive(name, op, KINDS[phase], nbytes, rule or ""))
    tensors.sort(key=lambda t: -t.nbytes)
    peak, least = int(memory.live[memory.peak]), lower_bound(memory.training)
    about = memory.pool_bytes, peak, memory.running, tuple(tensors)
    return Explanation(*about, least.nbytes, least.own_bytes, least.sets(nodes), memory.inexact)


def _tensor_name(name: str, output: int) -> str:
    """Name an output of an operator of this name; the first goes by the operator's."""
    return f"{name}[{output}]" if output else name


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
    why, reason : str
        Why it is kept, in a word and in words: 'output' of the network; by a 'rule'; 'mark', where
        the original's planner keeps what the user marked; 'cut', where what follows is computed
        again from it; 'gradient', where that of a kept operator reads it; 'cheap', where it is
        small or gone before the peak; 'budget', where the plan is the fastest within one, which
        allows it; 'search', where no smaller plan without it was found. Empty where it is not kept.
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
    memory: Memory, until: int | None, original: bool, budgeted: bool
) -> PlanExplanation:
    """Explain a plan tensor by tensor: who reads it, and when, and which rule leaves no choice.

    ``until``: the node of the network without a plan from which on everything is kept;
    ``original``: it is the original planner's, which keeps by the user's marks; ``budgeted``: it is
    the fastest within a budget, and not the smallest.
    """
    found, line, graph = memory.replay, memory.timeline, memory.graph
    training, operators, peak = found.training, memory.operators, memory.peak
    forward = (training.phases == FORWARD) & (operators >= 0) & ~training.tables.variable
    border = int(np.flatnonzero(forward[found.order]).max(initial=0))
    runs = operators[found.order[training.phases[found.order] != BACKWARD]]
    times = np.bincount(runs[runs >= 0], minlength=len(graph.nodes))
    ruled, readers = _kept_by_rule(graph, until), _readers(memory)
    little = SMALL * int(memory.live[peak])

    def why_of(k: int, x: int, output: int) -> tuple[str, str]:
        """Why a tensor of the timeline is kept, in a word and in words: the first that is true."""
        again, gradients = readers[int(training.tables.output_start[line.row[k]]) + output]
        reasons = (
            ((x, output) in graph.heads, "output", "it is an output of the network"),
            (x in ruled, "rule", ruled.get(x, "")),
            (again, "mark" if original else "cut", f"recomputed from it: {_some(graph, again)}"),
            (times[x] > 1, "gradient", f"the gradient of {_some(graph, gradients)} reads it"),
            (line.nbytes[k] <= little, "cheap", "it is less than 1/1000 of the peak"),
            (not line.start[k] <= peak <= line.stop[k], "cheap", "it is gone at the peak"),
            (budgeted, "budget", "the budget allows it, and recomputing it takes time"),
            (True, "search", "no smaller plan was found that recomputes it"),
        )
        return next((why, reason) for true, why, reason in reasons if true)

    tensors: list[Choice] = []
    for k in np.flatnonzero((line.kind == FORWARD) & forward[line.row]).tolist():
        output, x = int(line.output[k]), int(operators[line.row[k]])
        choice, why = "again" if times[x] > 1 else "freed", ("", "")
        if line.start[k] <= border < line.stop[k]:
            choice, why = "kept", why_of(k, x, output)
        name, op = _tensor_name(graph.nodes[x].name, output), graph.nodes[x].op
        tensors.append(Choice(name, op, int(line.nbytes[k]), choice, int(times[x]), *why))
    return PlanExplanation(tuple(tensors))


def _some(graph: ForwardGraph, nodes: Iterable[int]) -> str:
    """Name some nodes: the first, and how many others."""
    first, *others = [repr(graph.nodes[x].name) for x in nodes] or ["a kept operator"]
    return f"{first} and {len(others)} more" if others else first


def _readers(memory: Memory) -> dict[int, tuple[dict[int, None], dict[int, None]]]:
    """Find the operators that read each tensor when computed again, and by their gradients."""
    found = memory.replay
    t, phases = found.training.tables, found.training.phases
    entries = entries_read(t, found.recomputed, t.use_entry, t.use_row, t.use_owner)
    readers: Any = defaultdict(lambda: ({}, {}))  # dicts, for their order
    for row in found.order[phases[found.order] != FORWARD].tolist():
        x = int(memory.operators[row])
        if x >= 0:
            for entry in entries[t.use_start[row] : t.use_start[row + 1]].tolist():
                readers[entry][phases[row] == BACKWARD][x] = None
    return readers


def _kept_by_rule(graph: ForwardGraph, until: int | None) -> dict[int, str]:
    """Tell which rule keeps each of the nodes that a rule keeps."""
    found: dict[int, str | None] = {}
    if until is not None:
        inserted = [node.hidden.get(marks.RECORD) == marks.INSERTED for node in graph.nodes]
        first = int(np.flatnonzero(~np.array(inserted))[until])
        late = f"it does not come before {graph.nodes[first].name!r}"
        found = {i: late for i in graph.operators if i >= first}
    for i in graph.operators:
        found[i] = why_kept(graph.nodes[i].op, graph.nodes[i].attrs) or found.get(i)
    return {i: why for i, why in found.items() if why}
