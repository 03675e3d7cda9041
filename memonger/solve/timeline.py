"""Which tensors of a training step live when, and the operators of a network, as data to draw.

Numbers stand for texts (``Strings``), and for operators their rows of the table (``Operators``).
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.costs.time import measured as timing
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.graph.operators.tensors import Tensor
from memonger.solve.memory import Memory

STEPS = (2000, 1000, 500, 250, 120)  # how many are drawn at most; fewer where tensors are too many
PARTS, LITTLE, MOST = 8, 0.02, 0.8  # of a network: how many, and what share of memory counts
NONE = -1  # where nothing is told

#: What a tensor is: kept for the backward pass, gone before, recomputed, or a gradient.
KEPT, PASSING, AGAIN, GRADIENT = range(4)
STATES = {FORWARD: PASSING, RECOMPUTED: AGAIN, BACKWARD: GRADIENT}

Told = Mapping[int, Tuple[int, str]]  # by the place in a timeline: KEPT or PASSING, and why


class Strings:
    """Texts, each once; a number stands for each."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Return the number of a text; of an empty one NONE."""
        return self.known.setdefault(text, len(self.known)) if text else NONE


class Operators:
    """The table of the operators of a network, which is given without a plan."""

    def __init__(self, without: Memory, strings: Strings, device: Any, measure: bool) -> None:
        graph = without.graph
        at = list(graph.operators)
        self.strings, self.nodes = strings, [graph.nodes[i] for i in at]
        self.row = np.full(len(graph.nodes), NONE)
        self.row[at] = np.arange(len(at))
        self.shown = [graph.shown_tensors(i) for i in at]
        self.nbytes = [sum(tensor.nbytes for tensor in each) for each in self.shown]
        times = timing.find_times(without.training, device, measure)
        self.times, self.step = (times.forward[at], times.gradient[at]), float(times.step)
        self.parts, self.part = parts_of([node.name for node in self.nodes], self.nbytes)
        self.ops = [strings(node.op) for node in self.nodes]

    def columns(self) -> dict[str, Any]:
        """Tell what is the same with every plan; times are in seconds."""
        forward, gradient = ([float(f"{x:.4g}") for x in each.tolist()] for each in self.times)
        return {
            "name": [node.name for node in self.nodes],
            "op": self.ops,
            "part": self.part,
            "shape": [self.strings(shape_of(each[0])) if each else NONE for each in self.shown],
            "bytes": self.nbytes,
            "forward": forward,
            "gradient": gradient,
        }

    def rows_of(self, memory: Memory) -> np.ndarray:
        """Tell the row of the table that each node of a planned network is, or is a copy of."""
        nodes = memory.graph.nodes
        found, original = np.full(len(nodes) + 1, NONE), 0  # the last is of no node
        for i, node in enumerate(nodes):
            if not node.is_inserted:
                found[i] = self.row[original]
                original += 1
            elif node.inputs:
                found[i] = found[node.inputs[0][0]]
        return found


def shape_of(tensor: Tensor) -> str:
    """Tell a shape, and a type if it is not the usual one."""
    text = " × ".join(map(str, tensor.shape)) or "scalar"
    return text if tensor.dtype == "float32" else f"{text} {tensor.dtype}"


def parts_of(names: Sequence[str], nbytes: Sequence[int]) -> tuple[list[str], list[int]]:
    """Divide a network into parts, by what its names begin with, or by the order of operators.

    Returns the names of the parts, and the part of each operator.
    """
    words, total = [name.split("_") for name in names], sum(nbytes)
    best: tuple[list[str], list[int]] | None = None
    for depth in range(1, 4):
        of = ["_".join(each[:depth]) for each in words]
        found = dict.fromkeys(of, 0)
        for name, size in zip(of, nbytes):
            found[name] += size
        large = [name for name, size in found.items() if size >= LITTLE * total]
        if 2 <= len(large) <= PARTS and sum(found[name] for name in large) >= MOST * total:
            number = {name: k for k, name in enumerate(large)}
            best = [*large, "others"], [number.get(name, len(large)) for name in of]
    if best is not None:
        return best
    edges = np.linspace(0, len(names), min(PARTS, max(1, len(names))) + 1).astype(int)
    titles = [f"from {names[a]}" for a in edges[:-1] if a < len(names)]
    return titles, (np.searchsorted(edges, np.arange(len(names)), side="right") - 1).tolist()


class _Alive(NamedTuple):
    """Tensors of the pool, as columns."""

    place: np.ndarray  # in ``Memory.timeline``
    row: np.ndarray  # of the table of operators
    state: np.ndarray
    start: np.ndarray  # the first step in which it is alive
    stop: np.ndarray  # and the last
    reason: np.ndarray


def timeline(memory: Memory, table: Operators, told: Told, most: int) -> dict[str, Any]:
    """Tell which tensors are alive when, in steps: the operators of a training step as they run.

    Where there are more than ``most``, fewer steps are drawn, and tensors are merged that are of
    one kind and alive in the same of these. So the sum is right in each drawn step; the peak is
    one.
    """
    found = memory.replay
    runs = ~found.training.arrays.variable[found.order]  # variables take no time
    rows, live = found.order[runs], memory.live[runs]
    nodes = table.rows_of(memory)
    alive = _alive(memory, nodes, told, np.cumsum(runs) - 1, table.strings)
    for steps in STEPS:
        drawn = drawn_steps(live, steps)
        first = np.searchsorted(drawn, alive.start, side="left")
        last = np.searchsorted(drawn, alive.stop, side="right") - 1
        seen = np.flatnonzero(last >= first)
        groups = np.arange(len(seen))
        if len(seen) > most:
            ops, part = (np.append(each, NONE)[alive.row] for each in (table.ops, table.part))
            keys = np.stack([ops, part, alive.state, first, last])[:, seen]
            groups = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        if groups.max(initial=-1) < most:
            break
    places, phases = rows[drawn], found.training.phases[rows]
    merged = _merged(memory, _Alive(*(column[seen] for column in alive)), groups, table.strings)
    spans = {"first": first[seen], "last": last[seen]}
    heads = merged.pop("head")
    columns = {**merged, **{name: span[heads] for name, span in spans.items()}}
    return {
        "steps": len(live),
        "drawn": drawn.tolist(),
        "live": live[drawn].tolist(),
        "runs": nodes[memory.operators[places]].tolist(),
        "phase": phases[drawn].tolist(),
        "peak": int(np.argmax(live)) if len(live) else 0,
        "peak_bytes": int(live.max(initial=0)),
        "running": memory.running if len(live) else "",
        "backward": int(np.flatnonzero(phases == FORWARD).max(initial=-1)) + 1,
        "tensors": {name: column.tolist() for name, column in columns.items()},
    }


def drawn_steps(live: np.ndarray, most: int) -> np.ndarray:
    """Choose the steps that are drawn: all, or of neighbours the one with the most memory."""
    if len(live) <= most:
        return np.arange(len(live))
    edges = np.linspace(0, len(live), most + 1).astype(int)
    return np.array([a + int(np.argmax(live[a:b])) for a, b in zip(edges, edges[1:])])


def _alive(
    memory: Memory, nodes: np.ndarray, told: Told, step: np.ndarray, strings: Strings
) -> _Alive:
    """List the tensors that take memory; ``step`` is that of each place in the order."""
    line = memory.timeline
    place = np.flatnonzero(line.nbytes > 0)
    state = np.array([STATES[kind] for kind in line.kind[place].tolist()], dtype=np.int64)
    reason = np.full(len(place), NONE)
    for k, each in enumerate(place.tolist()):
        if each in told:
            state[k], text = told[each]
            reason[k] = strings(text)
    row = nodes[memory.operators[line.row[place]]]
    return _Alive(place, row, state, step[line.start[place]], step[line.stop[place]], reason)


def _merged(
    memory: Memory, alive: _Alive, groups: np.ndarray, strings: Strings
) -> dict[str, np.ndarray]:
    """Merge tensors of one group, under what the largest of them is."""
    line, training, nodes = memory.timeline, memory.replay.training, memory.graph.nodes
    nbytes = line.nbytes[alive.place]
    order = np.lexsort((-nbytes, groups))
    head = order[np.unique(groups[order], return_index=True)[1]]
    labels, shapes = [], []
    for place in alive.place[head].tolist():
        row, output = int(line.row[place]), int(line.output[place])
        x = int(memory.operators[row])
        inserted = x >= 0 and nodes[x].is_inserted
        labels.append(strings(nodes[x].name if inserted else "" if x >= 0 else training.ops[row]))
        shapes.append(strings(shape_of(training.signatures[row].tensors[output])))
    return {
        "head": head,
        "row": alive.row[head],
        "label": np.array(labels, dtype=np.int64),  # of what is in no row, or is a copy
        "output": line.output[alive.place[head]],
        "state": alive.state[head],
        "start": alive.start[head],
        "stop": alive.stop[head],
        "reason": alive.reason[head],
        "shape": np.array(shapes, dtype=np.int64),
        "bytes": np.bincount(groups, nbytes).astype(np.int64),
        "count": np.bincount(groups),
    }
