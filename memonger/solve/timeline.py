"""List which tensors of a training step live when, and the operators of a network, to be drawn.

Numbers stand for texts (``Strings``); operators are rows of a table (``OperatorTable``).
"""

from __future__ import annotations

from typing import Mapping, Sequence, Tuple

import numpy as np

from memonger.costs.time.times import TimedDevice, find_times
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.graph.operators.tensors import Tensor
from memonger.solve.memory import Memory
from memonger.support.types import Int64s, Json

STEPS = (2000, 1000, 500, 250, 120)  # how many are drawn at most; fewer where tensors are too many
PARTS, LITTLE, MOST = 8, 0.02, 0.8  # of a network: how many, and what share of memory counts
NONE = -1  # a text that is empty, or no row of the table

#: What a tensor is: kept for the backward pass, gone before, recomputed, or a gradient.
KEPT, PASSING, AGAIN, GRADIENT = range(4)
STATES = {FORWARD: PASSING, RECOMPUTED: AGAIN, BACKWARD: GRADIENT}

States = Mapping[int, Tuple[int, str]]  # by the place in a timeline: KEPT or PASSING, and why


class Strings:
    """Texts, each once; a number stands for each."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Return the number of a text; of an empty one NONE."""
        return self.numbers.setdefault(text, len(self.numbers)) if text else NONE


class OperatorTable:
    """The operators of a network, as columns; they are the same with every plan."""

    def __init__(self, unplanned: Memory, strings: Strings, device: TimedDevice) -> None:
        graph = unplanned.graph
        operators = list(graph.operators)
        self.strings, self.nodes = strings, [graph.nodes[i] for i in operators]
        self.row_of_node = np.full(len(graph.nodes), NONE)
        self.row_of_node[operators] = np.arange(len(operators))
        self.shown = [graph.shown_tensors(i) for i in operators]
        self.nbytes = [sum(tensor.nbytes for tensor in tensors) for tensors in self.shown]
        times = find_times(unplanned.training, device)
        self.forward, self.gradient = times.forward[operators], times.gradient[operators]
        self.step_seconds = float(times.step)
        self.parts, self.part = divide([node.name for node in self.nodes], self.nbytes)
        self.ops = [strings(node.op) for node in self.nodes]

    def columns(self) -> dict[str, Sequence[object]]:
        """Return the columns; times are in seconds."""
        shapes = [describe(tensors[0]) if tensors else "" for tensors in self.shown]
        return {
            "name": [node.name for node in self.nodes],
            "op": self.ops,
            "part": self.part,
            "shape": [self.strings(shape) for shape in shapes],
            "bytes": self.nbytes,
            "forward": [float(f"{seconds:.4g}") for seconds in self.forward.tolist()],
            "gradient": [float(f"{seconds:.4g}") for seconds in self.gradient.tolist()],
        }

    def rows_of(self, memory: Memory) -> Int64s:
        """Find the row of the table that each node of a planned network is, or is a copy of."""
        nodes = memory.graph.nodes
        rows, original = np.full(len(nodes) + 1, NONE), 0  # the last is of no node
        for i, node in enumerate(nodes):
            if not node.is_inserted:
                rows[i] = self.row_of_node[original]
                original += 1
            elif node.inputs:
                rows[i] = rows[node.inputs[0][0]]
        return rows


def describe(tensor: Tensor) -> str:
    """Describe a shape, and a type if it is not the usual one."""
    text = " × ".join(map(str, tensor.shape)) or "scalar"
    return text if tensor.dtype == "float32" else f"{text} {tensor.dtype}"


def divide(names: Sequence[str], nbytes: Sequence[int]) -> tuple[list[str], list[int]]:
    """Divide a network into parts, by what its names begin with, or by the order of operators.

    Returns the names of the parts, and the part of each operator.
    """
    parts, total = None, sum(nbytes)
    for depth in range(1, 4):
        prefixes = ["_".join(name.split("_")[:depth]) for name in names]
        sizes = dict.fromkeys(prefixes, 0)
        for prefix, size in zip(prefixes, nbytes):
            sizes[prefix] += size
        large = [prefix for prefix, size in sizes.items() if size >= LITTLE * total]
        if 2 <= len(large) <= PARTS and sum(sizes[prefix] for prefix in large) >= MOST * total:
            number = {prefix: k for k, prefix in enumerate(large)}
            parts = [*large, "others"], [number.get(prefix, len(large)) for prefix in prefixes]
    if parts is not None:
        return parts
    edges = np.linspace(0, len(names), min(PARTS, max(1, len(names))) + 1).astype(int)
    titles = [f"from {names[a]}" for a in edges[:-1] if a < len(names)]
    return titles, (np.searchsorted(edges, np.arange(len(names)), side="right") - 1).tolist()


def list_alive(memory: Memory, table: OperatorTable, states: States, most: int) -> Json:
    """List which tensors are alive when, in steps: the operators of a training step as they run.

    Where there are more than ``most``, fewer steps are drawn, and tensors are merged that are of
    one kind and alive in the same of these. So the sum is right in each drawn step; the peak is
    one.
    """
    training, order = memory.replay.training, memory.replay.order
    runs = ~training.arrays.variable[order]  # variables take no time
    rows, live = order[runs], memory.live[runs]
    row_of_node = table.rows_of(memory)
    alive = _find_alive(memory, row_of_node, states, np.cumsum(runs) - 1, table.strings)
    for steps in STEPS:
        drawn = choose_steps(live, steps)
        first = np.searchsorted(drawn, alive["start"], side="left")
        last = np.searchsorted(drawn, alive["stop"], side="right") - 1
        seen = np.flatnonzero(last >= first)
        groups = np.arange(len(seen))
        if len(seen) > most:
            kinds = [np.append(column, NONE)[alive["row"]] for column in (table.ops, table.part)]
            keys = np.stack([*kinds, alive["state"], first, last])[:, seen]
            groups = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        if groups.max(initial=-1) < most:
            break
    phases = training.phases[rows]
    shown = {**alive, "first": first, "last": last}
    shown = {name: column[seen] for name, column in shown.items()}
    return {
        "steps": len(live),
        "drawn": drawn.tolist(),
        "live": live[drawn].tolist(),
        "runs": row_of_node[memory.operators[rows[drawn]]].tolist(),
        "phase": phases[drawn].tolist(),
        "peak": int(np.argmax(live)) if len(live) else 0,
        "peak_bytes": int(live.max(initial=0)),
        "running": memory.running if len(live) else "",
        "backward": int(np.flatnonzero(phases == FORWARD).max(initial=-1)) + 1,
        "tensors": _merge(memory, shown, groups, table.strings),
    }


def choose_steps(live: Int64s, most: int) -> Int64s:
    """Choose the steps that are drawn: all, or of neighbours the one with the most memory."""
    if len(live) <= most:
        return np.arange(len(live))
    edges = np.linspace(0, len(live), most + 1).astype(int)
    return np.array([a + int(np.argmax(live[a:b])) for a, b in zip(edges, edges[1:])])


def _find_alive(
    memory: Memory, row_of_node: Int64s, states: States, step: Int64s, strings: Strings
) -> dict[str, Int64s]:
    """Find the tensors that take memory, as columns; ``step`` is of each place in the order."""
    line = memory.timeline
    places = np.flatnonzero(line.nbytes > 0)
    state = np.array([STATES[kind] for kind in line.kind[places].tolist()], dtype=np.int64)
    reason = np.full(len(places), NONE)
    for k, place in enumerate(places.tolist()):
        if place in states:
            state[k], text = states[place]
            reason[k] = strings(text)
    return {
        "place": places,  # in ``Memory.timeline``
        "row": row_of_node[memory.operators[line.row[places]]],  # of the table of operators
        "state": state,
        "start": step[line.start[places]],  # the first step in which it is alive
        "stop": step[line.stop[places]],  # and the last
        "reason": reason,
    }


def _merge(
    memory: Memory, alive: Mapping[str, Int64s], groups: Int64s, strings: Strings
) -> dict[str, list[int]]:
    """Merge the tensors of each group under the largest, and return them as columns."""
    line, training, nodes = memory.timeline, memory.replay.training, memory.graph.nodes
    nbytes = line.nbytes[alive["place"]]
    order = np.lexsort((-nbytes, groups))
    head = order[np.unique(groups[order], return_index=True)[1]]
    merged = {name: column[head].tolist() for name, column in alive.items()}
    labels, shapes, places = [], [], merged.pop("place")
    rows, outputs = line.row[places].tolist(), line.output[places].tolist()
    for row, output in zip(rows, outputs):
        x = int(memory.operators[row])
        inserted = x >= 0 and nodes[x].is_inserted
        labels.append(strings(nodes[x].name if inserted else "" if x >= 0 else training.ops[row]))
        shapes.append(strings(describe(training.signatures[row].tensors[output])))
    return {
        **merged,
        "label": labels,  # of what is in no row, or is a copy
        "output": outputs,
        "shape": shapes,
        "bytes": np.bincount(groups, nbytes).astype(np.int64).tolist(),
        "count": np.bincount(groups).tolist(),
    }
