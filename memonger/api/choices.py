"""Why a plan keeps what it keeps, and computes again what it computes again.

It is read off the replay of one training step with the plan (``explanation.Step``): who reads a
tensor, and when. What the rules leave no choice in is told by the rules themselves.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from memonger.api.explain import Step, tensor_name
from memonger.api.request import Network
from memonger.costs.memory import MB
from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, FORWARD, KEPT, RECOMPUTED
from memonger.graph.forward import ForwardGraph, no_collection

SMALL = 1 / 1000  # of the peak: what is not worth computing again
MOST_TRIED = 20_000_000  # tensors x nodes for which it is tried whether a rule keeps them


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

    tensors: tuple[Choice, ...]

    def __str__(self) -> str:
        lines = []
        for choice in ("kept", "again", "freed"):
            chosen = [t.nbytes for t in self.tensors if t.choice == choice]
            lines.append(f"{choice:6} {sum(chosen) / MB:10.1f} MB in {len(chosen)} tensors")
        lines += ["", "%-6s %10s  %-9s %-20s %s" % ("", "MB", "why", "operator", "tensor")]
        for t in self.tensors:
            line = f"{t.choice:6} {t.nbytes / MB:10.2f}  {t.why:9} {t.op:20} {t.name}"
            lines.append(line + (": " + t.reason if t.reason else ""))
        return "\n".join(lines)


@no_collection()
def explain_choices(
    network: Network, step: Step, original: bool, budgeted: bool
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
    training, n = found.training, len(graph.nodes)
    phase = training.phases[found.order]
    forward = (training.phases == FORWARD) & (step.operator >= 0) & ~training.tables.variable
    places = np.flatnonzero(forward[found.order])
    border = int(places[-1]) if len(places) else 0
    runs = step.operator[found.order[phase != BACKWARD]]
    times = np.bincount(runs[runs >= 0], minlength=n)
    readers = _readers(step)
    kept_by_rule = _kept_by_rule(network, graph, times > 1)
    heads, peak = set(graph.heads), step.peak
    little = SMALL * int(step.live[peak])

    def why_of(k: int) -> tuple[str, str]:
        """Why a tensor of the timeline is kept, in a word and in words."""
        row, output = int(line.row[k]), int(line.output[k])
        x = int(step.operator[row])
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
        output, x = int(line.output[k]), int(step.operator[line.row[k]])
        why = reason = ""
        if line.start[k] <= border < line.stop[k]:
            choice = "kept"
            why, reason = why_of(k)
        else:
            choice = "again" if times[x] > 1 else "freed"
        name = tensor_name(graph.nodes[x].name, output)
        op, nbytes = graph.nodes[x].op, int(line.nbytes[k])
        tensors.append(Choice(name, op, nbytes, choice, int(times[x]), why, reason))
    return PlanExplanation(tuple(tensors))


def _some(graph: ForwardGraph, nodes: Sequence[int], one: str = "", more: str = "") -> str:
    """Some nodes by name: the first, and how many others."""
    if not nodes:
        return "a kept operator"
    text = repr(graph.nodes[nodes[0]].name)
    if len(nodes) > 1:
        return ("%s and %d more %s" % (text, len(nodes) - 1, more)).rstrip()
    return (f"{text} {one}").rstrip()


def _readers(step: Step) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Of each tensor the operators that read it when computed again, and by their gradients."""
    found = step.memory.replay
    t, again = found.training.tables, found.recomputed
    phases = found.training.phases
    copies = int(t.output_start[t.forward])
    maker = np.repeat(np.arange(len(t.variable)), np.diff(t.output_start))
    of: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
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


def _kept_by_rule(network: Network, graph: ForwardGraph, again: np.ndarray) -> dict[int, str]:
    """Of the nodes that a rule keeps, which one.

    Those that must run once are known. For the others it is tried: recomputed beside what is
    recomputed already, do the rules leave them so?

    Parameters
    ----------
    network : Network
        Without the plan.
    graph : ForwardGraph
        With it, which may hold kept copies.
    again : np.ndarray of bool
        Its nodes that run again.
    """
    rules, before = network.rules, _before_copies(graph)
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
