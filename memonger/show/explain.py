"""The tensors in the memory of a network, as it stands or with a plan, from a replay of a step."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Callable, Iterable, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.costs.lower_bound import find_lower_bound
from memonger.costs.usage import Usage
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.show.groups import Group, Member, find_groups
from memonger.show.notebook import write_table
from memonger.show.record import PlanRecord
from memonger.show.timeline import find_kept
from memonger.solve.describe import NO_OPERATORS
from memonger.solve.facts import measure, predict
from memonger.solve.limits import CHEN2016
from memonger.solve.network import read_network
from memonger.support.errors import format_size
from memonger.support.types import Int64s, Shapes, SymbolOrBlock

if TYPE_CHECKING:
    Writer = Callable[[Sequence[str], str, Sequence["Row"]], str]
    Row = Tuple[str, str, str, str]  # size of tensors, what becomes of them, which they are, why

SHOWN = 12  # groups of the peak that are printed
KINDS = {FORWARD: "result", RECOMPUTED: "recomputed", BACKWARD: "gradient"}


def _table(lines: Sequence[str], title: str, rows: Sequence[Row]) -> str:
    """Write a table of tensors below some lines: their bytes, what becomes of them, which, why."""
    head = ["", f"{'memory':>10}  {title:10}  of"]
    texts = [f"{size:>10}  {fate:10}  {of}{why and f' ({why})'}" for size, fate, of, why in rows]
    return "\n".join([*lines, *head, *texts])


def _html_table(lines: Sequence[str], title: str, rows: Sequence[Row]) -> str:
    """Write as `_table` does, for a notebook."""
    figures = write_table([line.split(None, 1) for line in lines])
    return figures + write_table(rows, ["memory", title, "of", "why"])


class Alive(NamedTuple):
    """A tensor that is alive at the peak."""

    #: That of the operator that computes it, with ``[1]`` for its second output and so on. A sum of
    #: gradients, or the gradient of an output, has the name of the tensor whose gradient it is.
    name: str
    op: str
    kind: str  # 'result', 'recomputed' or 'gradient'
    nbytes: int
    rule: str  # why its operator must not be recomputed; empty if it may be
    shape: tuple[int, ...]


class Explanation(NamedTuple):
    """The memory of a training step, in bytes, tensor by tensor.

    It is counted operator by operator, as if pointwise fusion were off.

    Attributes
    ----------
    pool_bytes : int
        The size of MXNet's memory pool.
    peak_bytes, peak : int, str
        The most of it that is alive at once, and the operator that runs then.
    tensors : tuple of Alive
        The tensors that are alive then, the largest first.
    floor_bytes, floor_own_bytes, floor : int, int, str
        The least that is alive at once under any plan; the part of it that one operator itself
        needs, while the rest is held for others; and that operator.
    inexact : tuple of str
        Why the replay may be wrong; empty if it should not.
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
        """The lower bound of the memory of any plan, in words."""
        ruled, size = sum(t.nbytes for t in self.tensors if t.rule), self._size
        over = self.floor_bytes - self.floor_own_bytes
        text = f"{self.floor or 'nothing'} needs {size(self.floor_own_bytes)} at once"
        text += f", beside {size(over)} that cannot be recomputed" if over else ""
        return text + (f"; {size(ruled)} of the peak must not be recomputed" if ruled else "")

    @property
    def groups(self) -> tuple[Group, ...]:
        """The tensors that play one part in repeated parts of the network, the largest first."""
        members = [Member(t.name, t.op, t.shape, t.nbytes, t.kind, t.rule) for t in self.tensors]
        return find_groups(members)

    def __repr__(self) -> str:
        peak = f"{len(self.tensors)} tensors at the peak of {format_size(self.peak_bytes)}"
        return f"Explanation({peak})"

    def __str__(self) -> str:
        rows, more = self._largest()
        return self._table(rows) + (f"\n{more}" if more else "")

    def _repr_html_(self) -> str:
        rows, more = self._largest()
        return self._table(rows, _html_table) + (f"<p>{more}</p>" if more else "")

    def _size(self, nbytes: int) -> str:
        """Write bytes in the unit of the pool."""
        return format_size(nbytes, self.pool_bytes)

    def _largest(self) -> tuple[Sequence[Row], str]:
        """Return a row for each of the largest groups, and a line on the rest, if there is one."""
        groups = self.groups
        rows = [(self._size(g.nbytes), g.choice, str(g), g.why) for g in groups[:SHOWN]]
        rest = groups[SHOWN:]
        tensors, nbytes = sum(len(g.members) for g in rest), sum(g.nbytes for g in rest)
        return rows, f"{self._size(nbytes):>10}  in {tensors} more tensors" if rest else ""

    def details(self) -> str:
        """Write the same with each tensor on a line of its own."""
        texts = [f"{t.op:20}  {t.name}" for t in self.tensors]
        pairs = zip(self.tensors, texts)
        return self._table([(self._size(t.nbytes), t.kind, text, t.rule) for t, text in pairs])

    def _table(self, rows: Sequence[Row], write: Writer = _table) -> str:
        if not self.tensors and not self.pool_bytes:
            return NO_OPERATORS
        lines = [
            "pool       " + self._size(self.pool_bytes),
            f"peak       {self._size(self.peak_bytes)} alive at once, in {self.peak}",
            f"floor      {self._size(self.floor_bytes)}: {self.bounded_by}",
        ]
        for kind in KINDS.values():
            title = kind if kind == "recomputed" else kind + "s"
            chosen = [t.nbytes for t in self.tensors if t.kind == kind]
            share = f"{100 * sum(chosen) / max(1, self.peak_bytes):.0f} %"
            text = f"{self._size(sum(chosen))} of the peak ({share}), {len(chosen)} tensors"
            lines += [f"{title:10} {text}"] if chosen else []
        rows = [(n, kind, of, why and f"never recomputed: {why}") for n, kind, of, why in rows]
        return write(lines, "kind", rows)


def explain(
    net: SymbolOrBlock,
    shapes: Shapes | None = None,
    *,
    type_dict: Mapping[str, object] | None = None,
    grad_req: object = "write",
    ctx: object = None,
    devices: int = 1,
    **input_shapes: Sequence[int],
) -> Explanation:
    """List the tensors that make up the memory of a training step, and what every plan needs.

    A network that is planned already is explained with its plan.

    Parameters
    ----------
    net, shapes, type_dict, grad_req, ctx, devices, **input_shapes
        As `plan` takes them.

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
    request = read_network(
        net,
        shapes,
        input_shapes,
        type_dict=type_dict,
        grad_req=grad_req,
        ctx=ctx,
        devices=devices,
    )
    memory = predict(request)
    memory = measure(request) if memory.inexact else memory
    nodes, peak, step = memory.graph.nodes, memory.peak, memory.step
    tensors: list[Alive] = []
    for k in np.flatnonzero((memory.start <= peak) & (memory.stop >= peak)):
        row, output = int(memory.row[k]), int(memory.output[k])
        (name, op), x = step.name_and_op(row), int(memory.operators[row])
        phase = int(step.phases[row])
        rule = memory.graph.why_kept(x) if x >= 0 and phase == FORWARD else None
        name += f"[{output}]" if output else ""
        shape = step.signatures[row].tensors[output].shape
        tensors.append(Alive(name, op, KINDS[phase], int(memory.nbytes[k]), rule or "", shape))
    tensors.sort(key=lambda t: -t.nbytes)
    floor = find_lower_bound(memory.training)
    return Explanation(
        pool_bytes=memory.pool_bytes,
        peak_bytes=min(int(memory.live[peak]), memory.pool_bytes),
        peak=memory.running,
        tensors=tuple(tensors),
        floor_bytes=floor.nbytes,
        floor_own_bytes=floor.own_bytes,
        floor=floor.name(nodes),
        inexact=memory.inexact,
    )


class Choice(NamedTuple):
    """What a plan does with one tensor of the forward pass."""

    name: str  # of the operator that computes it, with ``[1]`` for its second output and so on
    op: str
    nbytes: int
    #: 'kept' from the forward pass for the backward pass; 'recomputed'; or 'freed' in the forward
    #: pass, because no gradient reads it, or because another tensor takes over its memory.
    choice: str
    times: int  # how often its operator runs in a training step
    why: str  # it is kept, in a word (see ``docs/choosing-a-planner.md``); empty if it is not
    reason: str  # the same in a sentence
    shape: tuple[int, ...]


class PlanExplanation(NamedTuple):
    """What a plan does with each tensor of the forward pass, in execution order."""

    tensors: tuple[Choice, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The tensors that play one part in repeated parts of the network, the largest first."""
        members = [Member(t.name, t.op, t.shape, t.nbytes, t.choice, t.why) for t in self.tensors]
        return find_groups(members)

    def __repr__(self) -> str:
        return f"PlanExplanation({len(self.tensors)} tensors)"

    def __str__(self) -> str:
        return self._table(self._rows())

    def _repr_html_(self) -> str:
        return self._table(self._rows(), _html_table)

    def _rows(self) -> Sequence[Row]:
        rows, largest = [], self._largest()
        for g in self.groups:
            reasons = {self.tensors[k].reason for k in g.members}
            reason = reasons.pop() if len(reasons) == 1 else ""
            why = ": ".join(filter(None, (g.why, reason)))
            rows.append((format_size(g.nbytes, largest), g.choice, str(g), why))
        return rows

    def details(self) -> str:
        """Write the same with each tensor on a line of its own, in execution order."""
        whys = [t.why and f"{t.why}: {t.reason}" for t in self.tensors]
        texts = [f"{t.op:20}  {t.name}" for t in self.tensors]
        rows, largest = zip(self.tensors, texts, whys), self._largest()
        return self._table(
            [(format_size(t.nbytes, largest), t.choice, text, why) for t, text, why in rows]
        )

    @property
    def sums(self) -> dict[str, tuple[int, int]]:
        """The bytes and the number of all tensors that are kept, recomputed, and freed."""
        sums = {}
        for choice in ("kept", "recomputed", "freed"):
            chosen = [t.nbytes for t in self.tensors if t.choice == choice]
            sums[choice] = sum(chosen), len(chosen)
        return sums

    def _largest(self) -> int:
        """Return the largest sum, in bytes: its unit is that of all."""
        return max(nbytes for nbytes, _ in self.sums.values())

    def _table(self, rows: Sequence[Row], write: Writer = _table) -> str:
        largest = self._largest()
        lines = [
            f"{choice:10} {format_size(nbytes, largest)}, {count} tensors"
            for choice, (nbytes, count) in self.sums.items()
        ]
        return write(lines, "choice", rows)


def explain_choices(plan: PlanRecord, memory: Usage) -> PlanExplanation:
    """Explain a plan tensor by tensor: who reads it, and when, and which rule leaves no choice.

    ``memory`` is that of a training step with the plan.
    """
    nodes, peak = memory.graph.nodes, memory.peak
    starts = memory.step.arrays.output_start
    times = 1 + np.bincount(memory.recomputed, minlength=len(nodes))
    ours = [i for i, n in enumerate(nodes) if not n.is_inserted]
    late = len(nodes) if plan.request.until is None else ours[plan.request.until]
    kept = {ours[k] for k in plan.request.keep.nodes}
    has_budget, word = "budget" in plan.options, "mark" if plan.planner == CHEN2016 else "cut"
    readers, negligible = _readers(memory), int(memory.live[peak]) / 1000

    def some(operators: Iterable[int]) -> str:
        first, *others = [repr(nodes[x].name) for x in operators] or ["a kept operator"]
        return f"{first} and {len(others)} more" if others else first

    def why_of(k: int, x: int, output: int) -> tuple[str, str]:
        """Return why a tensor in the pool is kept, in a word and in words: the first reason."""
        entry = int(starts[memory.row[k]]) + output
        recomputed, gradients = readers[RECOMPUTED, entry], readers[BACKWARD, entry]
        rule = memory.graph.why_kept(x)
        if (x, output) in memory.graph.heads:
            return "output", "it is an output of the network"
        if rule:
            return "rule", rule
        if x >= late:
            return "you", f"it does not come before {nodes[late].name!r}"
        if x in kept:
            return "you", "keep= names it"
        if recomputed:
            return word, f"recomputed from it: {some(recomputed)}"
        if times[x] > 1:
            return "gradient", f"the gradient of {some(gradients)} reads it"
        if memory.nbytes[k] <= negligible:
            return "cheap", "it is less than 1/1000 of the peak"
        if not memory.start[k] <= peak <= memory.stop[k]:
            return "cheap", "it is gone at the peak"
        if has_budget:
            return "budget", "the budget allows it, and recomputing it takes time"
        return "search", "no smaller plan was found that recomputes it"

    tensors: list[Choice] = []
    is_kept = find_kept(memory)
    for k in find_results(memory):
        output, x = int(memory.output[k]), int(memory.operators[memory.row[k]])
        choice, (why, reason) = "recomputed" if times[x] > 1 else "freed", ("", "")
        if is_kept[k]:
            choice, (why, reason) = "kept", why_of(k, x, output)
        name = nodes[x].name + (f"[{output}]" if output else "")
        shape = memory.step.signatures[memory.row[k]].tensors[output].shape
        nbytes = int(memory.nbytes[k])
        tensors.append(Choice(name, nodes[x].op, nbytes, choice, int(times[x]), why, reason, shape))
    return PlanExplanation(tuple(tensors))


def find_results(memory: Usage) -> Int64s:
    """Find the tensors in the pool that operators compute in the forward pass."""
    return np.flatnonzero((memory.kind == FORWARD) & (memory.operators[memory.row] >= 0))


def _readers(memory: Usage) -> Mapping[tuple[int, int], Mapping[int, None]]:
    """Return the operators, as they run, that read each tensor in a phase: by (phase, entry)."""
    t, order, entry = memory.step.arrays, memory.ran.order, memory.ran.entry
    readers: defaultdict[tuple[int, int], dict[int, None]] = defaultdict(dict)
    for phase in (RECOMPUTED, BACKWARD):
        for row in order[memory.find_places(phase)].tolist():
            reads = slice(*t.read_start[row : row + 2])
            for read in entry[reads][t.read_holds[reads]].tolist():
                readers[phase, read][int(memory.operators[row])] = None
    return readers
