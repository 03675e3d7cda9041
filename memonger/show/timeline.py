"""List the lifetimes of the tensors of a training step, and the operators of a network, to draw."""

from __future__ import annotations

from typing import Mapping, Sequence

import numpy as np

from memonger.costs.time.roofline import Times
from memonger.costs.usage import Usage
from memonger.graph.arrays import FORWARD
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.tensors import Tensor
from memonger.support.types import Bools, Int64s, Json

STEPS = (2000, 1000, 500, 250, 120)  # steps drawn at most; fewer if there are too many tensors
MAX_PARTS = 8  # of a network
LEAST_OF_PART, LEAST_OF_PARTS = 0.02, 0.8  # least share of memory: of one part, of all named parts
NONE = -1  # the row of a node that is not an operator of the network

#: The state of a tensor: KEPT for the backward pass, or its phase (`FORWARD` and so on) plus one.
KEPT = 0


def list_operators(memory: Usage, times: Times) -> dict[str, list[Json]]:
    """List the operators of a network without a plan, as columns; times in seconds."""
    graph = memory.graph
    operators = [*graph.operators]
    shown = [graph.shown_tensors(i) for i in operators]
    names = [graph.nodes[i].name for i in operators]
    nbytes = [sum(tensor.nbytes for tensor in tensors) for tensors in shown]
    return {
        "name": names,
        "op": [graph.nodes[i].op for i in operators],
        "part": divide(names, nbytes),
        "shape": [describe(tensors[0]) if tensors else "" for tensors in shown],
        "bytes": nbytes,
        "forward": [float(f"{seconds:.4g}") for seconds in times.forward_seconds[operators]],
        "gradient": [float(f"{seconds:.4g}") for seconds in times.gradient_seconds[operators]],
    }


def divide(names: Sequence[str], nbytes: Sequence[int]) -> list[str]:
    """Name the part of the network of each operator, by the beginning of its name or by order."""
    parts, total = None, sum(nbytes)
    for depth in range(1, 4):
        prefixes = ["_".join(name.split("_")[:depth]) for name in names]
        sizes = dict.fromkeys(prefixes, 0)
        for prefix, size in zip(prefixes, nbytes):
            sizes[prefix] += size
        large = {prefix: size for prefix, size in sizes.items() if size >= LEAST_OF_PART * total}
        if 2 <= len(large) <= MAX_PARTS and sum(large.values()) >= LEAST_OF_PARTS * total:
            parts = [prefix if prefix in large else "others" for prefix in prefixes]
    if parts is not None:
        return parts
    edges = np.linspace(0, len(names), min(MAX_PARTS, max(1, len(names))) + 1).astype(int)
    number = np.searchsorted(edges, np.arange(len(names)), side="right") - 1
    return [f"from {names[edge]}" for edge in edges[number]]


def describe(tensor: Tensor) -> str:
    """Describe a shape, and a type other than float32."""
    text = " × ".join(map(str, tensor.shape)) or "scalar"
    return text if tensor.dtype == "float32" else f"{text} {tensor.dtype}"


def find_rows(graph: ForwardGraph) -> Int64s:
    """Find the row in `list_operators` of each node of a network with a plan; NONE for the rest.

    A node that the plan has inserted has the row of its input. There is one more NONE at the end.
    """
    rows, count = np.full(len(graph.nodes) + 1, NONE), 0
    for i, node in enumerate(graph.nodes):
        if node.is_inserted:
            rows[i] = rows[node.inputs[0][0]] if node.inputs else NONE
        elif not node.is_variable:
            rows[i], count = count, count + 1
    return rows


def find_kept(memory: Usage) -> Bools:
    """Find which tensors the forward pass keeps for the backward pass."""
    border = memory.find_places(FORWARD).max(initial=0)
    return (memory.kind == FORWARD) & (memory.start <= border) & (border < memory.stop)


def list_alive(
    memory: Usage, operators: Mapping[str, Sequence[Json]], reasons: Mapping[int, str], most: int
) -> Json:
    """List the tensors that are alive in each step; a step is a run of an operator.

    Parameters
    ----------
    memory : Usage
        The training step.
    operators : mapping
        Columns of the operators, as `list_operators` returns them.
    reasons : mapping
        Index of a tensor -> why it is kept or recomputed.
    most : int
        The most tensors to list. If there are more, fewer steps are drawn, and tensors of one kind
        that are alive in the same drawn steps are merged. So the sum is right in each drawn step.
        The peak is always drawn.
    """
    step, order = memory.step, memory.ran.order
    runs = ~step.arrays.variable[order]  # variables take no time
    live, ran, number = memory.live[runs], order[runs], np.cumsum(runs) - 1
    row_of_node, phases = find_rows(memory.graph), step.phases[ran]
    places = np.flatnonzero(memory.nbytes > 0)
    row, nbytes = row_of_node[memory.operators[memory.row[places]]], memory.nbytes[places]
    state = np.where(find_kept(memory), KEPT, memory.kind + 1)[places]
    start, stop = number[memory.start[places]], number[memory.stop[places]]
    numbers = [np.unique(operators[name], return_inverse=True)[1] for name in ("op", "part")]
    kinds = [np.append(column, NONE)[row] for column in numbers]
    for steps in STEPS:
        drawn = choose_steps(live, steps)
        first = np.searchsorted(drawn, start, side="left")
        last = np.searchsorted(drawn, stop, side="right") - 1
        seen = np.flatnonzero(last >= first)
        groups = np.arange(len(seen))
        if len(seen) > most:
            keys = np.stack([*kinds, state, first, last])[:, seen]
            groups = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        if groups.max(initial=-1) < most:
            break
    by_size = np.lexsort((-nbytes[seen], groups))
    largest = seen[by_size[np.unique(groups[by_size], return_index=True)[1]]]  # of each group
    columns = {"row": row, "state": state, "start": start, "stop": stop}
    columns.update(first=first, last=last)
    shown = places[largest].tolist()
    tensors = [step.signatures[memory.row[k]].tensors[memory.output[k]] for k in shown]
    return {
        "steps": len(live),
        "drawn": drawn.tolist(),
        "live": live[drawn].tolist(),
        "runs": row_of_node[memory.operators[ran[drawn]]].tolist(),
        "phase": phases[drawn].tolist(),
        "peak": int(np.argmax(live)) if len(live) else 0,
        "peak_bytes": int(live.max(initial=0)),
        "running": memory.running if len(live) else "",
        "backward": int(np.flatnonzero(phases == FORWARD).max(initial=-1)) + 1,
        "tensors": {
            **{name: column[largest].tolist() for name, column in columns.items()},
            "label": [_label(memory, int(memory.row[place])) for place in shown],
            "output": memory.output[shown].tolist(),
            "shape": [describe(tensor) for tensor in tensors],
            "reason": [reasons.get(place, "") for place in shown],
            "bytes": np.bincount(groups, nbytes[seen]).astype(np.int64).tolist(),
            "count": np.bincount(groups).tolist(),
        },
    }


def _label(memory: Usage, row: int) -> str:
    """Return a name for the row of a tensor that is not an operator of the network itself."""
    x = int(memory.operators[row])
    if x < 0:
        return memory.step.ops[row]
    node = memory.graph.nodes[x]
    return node.name if node.is_inserted else ""


def choose_steps(live: Int64s, most: int) -> Int64s:
    """Choose the steps to draw: all, or from each group of neighbours the one with most memory."""
    if len(live) <= most:
        return np.arange(len(live))
    edges = np.linspace(0, len(live), most + 1).astype(int)
    return np.array([a + int(np.argmax(live[a:b])) for a, b in zip(edges, edges[1:])])
