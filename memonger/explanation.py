"""Why a network needs the memory that it needs, and why a plan keeps what it keeps.

All of it is read off the replay of one training step (``allocator.Timeline``): what is alive when,
what runs then, and who reads it. Nothing is bound.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from memonger import marks
from memonger.allocator import Replay, Timeline
from memonger.bounds import Floor, floor
from memonger.costs import MB
from memonger.flops import forward_flops
from memonger.forward import ForwardGraph, forward_graph, no_collection
from memonger.inputs import InputSpec, check_device, check_symbol, read_grad_req, read_shapes
from memonger.memory import Memory, predict
from memonger.network import Network
from memonger.operators import why_kept
from memonger.rows import ITSELF, MASKED
from memonger.rules import Rules
from memonger.tables import BACKWARD, FORWARD, KEPT, RECOMPUTED
from memonger.training import TrainingGraph
from memonger.training_step import TrainingStep

SHOWN = 12  # tensors of the peak that are printed
SMALL = 1 / 1000  # of the peak: what is not worth computing again
KINDS = {"result": "results", "computed again": "again", "gradient": "gradients"}
MOST_TRIED = 20_000_000  # tensors x nodes for which it is tried whether a rule keeps them


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
        Bytes alive in each step, without the gradients that a schedule's pool holds.
    """

    memory: Memory
    operator: np.ndarray
    timeline: Timeline
    live: np.ndarray

    @property
    def graph(self) -> ForwardGraph:
        return self.memory.replay.training.graph

    @property
    def peak(self) -> int:
        """The step in which the most is alive."""
        return int(np.argmax(self.live))

    def running(self, place: int) -> str:
        """What runs in a step, in words."""
        return described(self.memory.replay, self.operator, int(self.memory.replay.order[place]))


@no_collection()
def step_of(symbol: Any, spec: InputSpec, grad_req: Mapping[str, str], device: Any) -> Step:
    """Replay a training step of a symbol, with the marks or the schedule that it carries."""
    memory = predict(symbol, forward_graph(symbol, spec), grad_req, device)
    timeline = memory.replay.timeline()
    return Step(
        memory,
        operators_of(memory.replay),
        timeline,
        timeline.live_bytes(without=memory.pooled),
    )


def operators_of(found: Replay) -> np.ndarray:
    """For each row the operator that it is part of (see `Step`)."""
    training: Any = found.training
    n = len(training.graph.nodes)
    if isinstance(training, TrainingStep):
        rows, plain = training.rows, training.training
        own = (rows.what == ITSELF) | (rows.what == MASKED)
        return np.where(own, _of_rows(plain, n)[np.where(own, rows.source, 0)], -1)
    return _of_rows(training, n)


def _of_rows(training: TrainingGraph, n: int) -> np.ndarray:
    return np.concatenate([np.arange(n), np.arange(n), training.owners])


def described(found: Replay, operator: np.ndarray, row: int) -> str:
    """What a row runs, in words."""
    x, phase = int(operator[row]), int(found.training.phases[row])
    if x < 0:
        return "%r (%s)" % (found.training.names[row], found.training.ops[row])
    node = found.training.graph.nodes[x]
    how = {FORWARD: "%r (%s)", RECOMPUTED: "%r (%s) again", BACKWARD: "the gradient of %r (%s)"}
    return how[phase] % (node.name, node.op)


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

    def before(self, moved: np.ndarray) -> "Segment":
        """The same in the network without kept copies; ``moved`` is its nodes' new indices."""
        first, last = np.searchsorted(moved, [self.first, self.last], side="right") - 1
        return self._replace(first=int(first), last=int(last))


def slowest_segment(found: Replay) -> Optional[Segment]:
    """The most work that is done again at once; None where nothing is."""
    operator = operators_of(found)[found.order]
    phase = found.training.phases[found.order]
    each = forward_flops(found.training.graph)
    own = np.where((phase == RECOMPUTED) & (operator >= 0), each[operator], 0.0)
    again = np.flatnonzero((phase == RECOMPUTED) & (operator >= 0))
    if not len(again):
        return None
    gradients = np.cumsum(phase == BACKWARD)[again]  # that have run before
    _, start = np.unique(gradients, return_index=True)
    work = np.add.reduceat(own[again], start)
    count = np.diff(np.append(start, len(again)))
    k = int(np.lexsort((count, work))[-1])
    nodes = operator[again[start[k] : start[k] + count[k]]]
    total = each[operator[(phase == FORWARD) & (operator >= 0)]].sum()
    return Segment(int(nodes[0]), int(nodes[-1]), len(nodes), float(work[k] / max(1.0, total)))


# -- a network --------------------------------------------------------------------------------


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
    tensors: Tuple[Alive, ...]
    floor_bytes: int
    floor_own_bytes: int
    floor: str
    inexact: Tuple[str, ...]

    @property
    def bounded_by(self) -> str:
        """What bounds the memory of any plan from below, in words."""
        ruled = sum(t.nbytes for t in self.tensors if t.rule)
        text = "%s needs %.1f MB at once" % (self.floor or "nothing", self.floor_own_bytes / MB)
        over = self.floor_bytes - self.floor_own_bytes
        if over:
            text += ", and %.1f MB that cannot be computed again are held over it" % (over / MB)
        if ruled:
            text += "; %.1f MB of the peak must not be computed again" % (ruled / MB)
        return text

    def __str__(self) -> str:
        lines = [
            "pool      %.1f MB" % (self.pool_bytes / MB),
            "peak      %.1f MB alive at once, in %s" % (self.peak_bytes / MB, self.peak),
            "floor     %.1f MB: %s" % (self.floor_bytes / MB, self.bounded_by),
        ]
        for kind, title in KINDS.items():
            chosen = [t.nbytes for t in self.tensors if t.kind == kind]
            if chosen:
                share = 100 * sum(chosen) / max(1, self.peak_bytes)
                lines.append(
                    "%-9s %.1f MB of the peak (%.0f %%), %d tensors"
                    % (title, sum(chosen) / MB, share, len(chosen))
                )
        lines += ["", "%10s  %-14s  %-20s  %s" % ("MB", "kind", "operator", "of")]
        for t in self.tensors[:SHOWN]:
            row = "%10.1f  %-14s  %-20s  %s" % (t.nbytes / MB, t.kind, t.op, t.name)
            lines.append(row + (" (never again: %s)" % t.rule if t.rule else ""))
        rest = [t.nbytes for t in self.tensors[SHOWN:]]
        if rest:
            lines.append("%10.1f  in %d more" % (sum(rest) / MB, len(rest)))
        return "\n".join(lines)


def explain(
    net: Any,
    shapes: Any = None,
    *,
    type_dict: Optional[Mapping[str, Any]] = None,
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
    found, line = step.memory.replay, step.timeline
    alive = np.flatnonzero((line.start <= step.peak) & (line.stop >= step.peak))
    pooled = step.memory.pooled
    tensors: List[Alive] = []
    for k in alive.tolist():
        row, output = int(line.row[k]), int(line.output[k])
        if (row, output) in pooled:
            continue
        x = int(step.operator[row])
        phase = int(line.kind[k])
        name, op = found.training.names[row], found.training.ops[row]
        rule = ""
        if x >= 0:
            node = step.graph.nodes[x]
            name, op = node.name, node.op
            rule = (why_kept(op, node.attrs) or "") if phase == FORWARD else ""
        kind = {FORWARD: "result", RECOMPUTED: "computed again", BACKWARD: "gradient"}[phase]
        named = "%s[%d]" % (name, output) if output else name
        tensors.append(Alive(named, op, kind, int(line.nbytes[k]), rule))
    tensors.sort(key=lambda t: -t.nbytes)
    least, plain = floor_of(found)
    return Explanation(
        step.memory.pool_bytes,
        int(step.live.max(initial=0)),
        step.running(step.peak) if len(step.live) else "",
        tuple(tensors),
        least.nbytes,
        least.own_bytes,
        floor_text(plain, least),
        step.memory.inexact,
    )


def floor_of(found: Replay) -> Tuple[Floor, TrainingGraph]:
    """The floor under all plans of a network, and the training graph that it is told in."""
    training: Any = found.training
    plain: TrainingGraph = training.training if isinstance(training, TrainingStep) else training
    return floor(plain), plain


def floor_text(training: TrainingGraph, least: Floor) -> str:
    """What sets the floor, in words; empty if nothing does."""
    if least.operator < 0:
        return ""
    nodes = training.graph.nodes
    return least.sets(nodes[least.operator].name, nodes[least.operator].op, len(nodes))


def where_it_peaks(memory: Memory) -> str:
    """Where the most of a plan is alive, as a sentence."""
    found = memory.replay
    live = found.timeline().live_bytes(without=memory.pooled)
    if not live.max(initial=0):
        return ""
    peak = int(np.argmax(live))
    running = described(found, operators_of(found), int(found.order[peak]))
    return "Its peak of %.1f MB is in %s. " % (live[peak] / MB, running)


def why_not_less(network: Network) -> str:
    """What no plan can do without, as a sentence."""
    least = floor(network.training, bare=network.rules.bare)
    if least.operator < 0:
        return ""
    return "No plan can do with less than %.1f MB alive at once, for %s needs them." % (
        least.nbytes / MB,
        floor_text(network.training, least),
    )


def held_by_rule(found: Replay, reasons: Mapping[int, str]) -> Dict[int, int]:
    """Bytes at the peak of what must not be computed again, for each such operator (node)."""
    line = found.timeline()
    peak = int(np.argmax(line.live_bytes()))
    there = (line.start <= peak) & (line.stop >= peak) & (line.kind == FORWARD)
    operator = operators_of(found)[line.row[there]]
    held: Dict[int, int] = {}
    for x, nbytes in zip(operator.tolist(), line.nbytes[there].tolist()):
        if x in reasons:
            held[x] = held.get(x, 0) + nbytes
    return held


# -- a plan -----------------------------------------------------------------------------------


class Choice(NamedTuple):
    """What a plan does with one tensor of the forward pass.

    Attributes
    ----------
    name : str
        The operator that makes it; with ``[1]`` its second output, and so on.
    op : str
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

    tensors: Tuple[Choice, ...]

    def __str__(self) -> str:
        lines = []
        for choice in ("kept", "again", "freed"):
            chosen = [t.nbytes for t in self.tensors if t.choice == choice]
            lines.append("%-6s %10.1f MB in %d tensors" % (choice, sum(chosen) / MB, len(chosen)))
        lines += ["", "%-6s %10s  %-9s %-20s %s" % ("", "MB", "why", "operator", "tensor")]
        for t in self.tensors:
            line = "%-6s %10.2f  %-9s %-20s %s" % (t.choice, t.nbytes / MB, t.why, t.op, t.name)
            lines.append(line + (": " + t.reason if t.reason else ""))
        return "\n".join(lines)


@no_collection()
def choices(
    network: Network, step: Step, original: bool, budgeted: bool = False
) -> PlanExplanation:
    """Explain a plan tensor by tensor.

    Parameters
    ----------
    network : Network
        As it was planned.
    step : Step
        A training step with the plan.
    original : bool
        Whether the planner was the original's, which keeps by the user's marks.
    budgeted : bool
        Whether the plan is the fastest within a budget, and not the smallest.
    """
    found, line, graph = step.memory.replay, step.timeline, step.graph
    training, n = found.training, len(step.graph.nodes)
    forward = (training.phases == FORWARD) & (step.operator >= 0)
    forward &= ~training.tables.variable
    places = np.flatnonzero(forward[found.order])
    border = int(places[-1]) if len(places) else 0
    times = np.bincount(
        step.operator[found.order[(training.phases != BACKWARD)[found.order]]] + 1, minlength=n + 1
    )[1:]
    readers = _readers(step)
    before = _before_copies(graph)
    kept_by_rule = _kept_by_rule(network, before, times > 1, graph)
    heads = set(graph.heads)
    threshold = SMALL * int(step.live.max(initial=0))
    tensors: List[Choice] = []
    for k in range(len(line.row)):
        row, output = int(line.row[k]), int(line.output[k])
        if line.kind[k] != FORWARD or not forward[row]:
            continue
        x = int(step.operator[row])
        node, nbytes = graph.nodes[x], int(line.nbytes[k])
        why = reason = ""
        choice = "kept" if line.start[k] <= border < line.stop[k] else "freed"
        if choice == "freed" and times[x] > 1:
            choice = "again"
        if choice == "kept":
            again, gradients = readers.get((row, output), ((), ()))
            if (x, output) in heads:
                why, reason = "output", "it is an output of the network"
            elif x in kept_by_rule:
                why, reason = "rule", kept_by_rule[x]
            elif again:
                why = "mark" if original else "cut"
                reason = "%s computed again from it" % _some(graph, again, "is", "are")
            elif times[x] > 1:
                why = "gradient"
                reason = "the gradient of %s reads it" % _some(graph, gradients)
            elif nbytes <= threshold:
                why, reason = "cheap", "less than 1/1000 of the peak"
            elif not line.start[k] <= step.peak <= line.stop[k]:
                why, reason = "cheap", "it is gone at the peak"
            elif budgeted:
                why, reason = "budget", "the budget allows it, and computing it again takes time"
            else:
                why, reason = "search", "no smaller plan was found that computes it again"
        name = "%s[%d]" % (node.name, output) if output else node.name
        tensors.append(Choice(name, node.op, nbytes, choice, int(times[x]), why, reason))
    return PlanExplanation(tuple(tensors))


def _some(graph: ForwardGraph, nodes: Sequence[int], one: str = "", more: str = "") -> str:
    """Some nodes by name: the first, and how many others."""
    if not nodes:
        return "a kept operator"
    text = repr(graph.nodes[nodes[0]].name)
    if len(nodes) > 1:
        return ("%s and %d more %s" % (text, len(nodes) - 1, more)).rstrip()
    return ("%s %s" % (text, one)).rstrip()


def _readers(step: Step) -> Dict[Tuple[int, int], Tuple[List[int], List[int]]]:
    """Of each tensor the operators that read it when computed again, and by their gradients."""
    found = step.memory.replay
    t, again = found.training.tables, found.recomputed
    phases = found.training.phases
    copies = int(t.output_start[t.forward])
    maker = np.repeat(np.arange(len(t.variable)), np.diff(t.output_start))
    of: Dict[Tuple[int, int], Tuple[List[int], List[int]]] = {}
    for row in found.order.tolist():
        phase, x = int(phases[row]), int(step.operator[row])
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


def _before_copies(graph: ForwardGraph) -> np.ndarray:
    """For each node its index in the network without kept copies; -1 for these."""
    ours = np.array([n.hidden.get(marks.RECORD) == marks.INSERTED for n in graph.nodes], dtype=bool)
    return np.where(ours, -1, np.cumsum(~ours) - 1)


def _kept_by_rule(
    network: Network, before: np.ndarray, again: np.ndarray, graph: ForwardGraph
) -> Dict[int, str]:
    """Of the nodes that a rule keeps, which one.

    Those that must run once are known. For the others it is tried: recomputed beside what is
    recomputed already, do the rules leave them so?
    """
    rules: Rules = network.rules
    found = {
        i: rules.reasons[int(x)] for i, x in enumerate(before) if x >= 0 and int(x) in rules.reasons
    }
    until = network.request.until
    for i, x in enumerate(before):
        if x >= 0 and until is not None and x >= until and not graph.nodes[i].is_variable:
            found.setdefault(i, "it does not come before %r" % network.graph.nodes[until].name)
    mask = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    mask[before[(before >= 0) & again]] = True
    if not mask.any():
        return found
    candidates = [
        i
        for i, x in enumerate(before)
        if x >= 0 and not again[i] and rules.allowed[x] and i not in found
    ]
    if len(candidates) * len(before) > MOST_TRIED:
        return found
    same = rules.trainings[0].same
    for i in candidates:
        x = int(before[i])
        tried = mask.copy()
        tried[x] = True
        if rules.apply(tried)[x]:
            continue
        twins = [y for y in range(len(same)) if same[y] == same[x] and y != x]
        if twins:
            found[i] = "MXNet merges it with %r, which has the same marks therefore" % (
                network.graph.nodes[twins[0]].name
            )
        else:
            found[i] = "nobody would read what is computed again, which not every device bears"
    return found
