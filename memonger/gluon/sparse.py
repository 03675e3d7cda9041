"""Plan blocks with sparse gradients: split off the operators that make them.

The number of rows of a sparse gradient (``sparse_grad``) depends on the batch, so no plan can hold
it. The operators with sparse gradients, and the operators that they read, become a separate
CachedOp, the *front*, which autograd records. Its results are inputs of the *rest*, which a plan
trains. Their gradients reach the front through the tape, and MXNet computes the sparse gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable, Mapping, NamedTuple, Sequence

from memonger.gluon.bound import reached
from memonger.gluon.cached_op import PlannedBlock, PlannedOp
from memonger.gluon.outputs import merged
from memonger.graph.operators.gradients import makes_rows
from memonger.graph.operators.recompute import draws
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.symbols import attributes, load_nodes, read
from memonger.support.types import NDArray, Parameter, Symbol
from memonger.support.variables import NULL, mark_of

if TYPE_CHECKING:
    from memonger.gluon.bound import Arrays


class SplitBlock(NamedTuple):
    """The two symbols of a block, and the names that connect them."""

    front: Symbol
    rest: Symbol
    results: list[str]  # names of the outputs of the front, as inputs of the rest


def split(symbol: Symbol, parameters: Mapping[str, Parameter], arrays: Arrays) -> SplitBlock | None:
    """Split a block; return None if it has no sparse arrays and gradients.

    Raises
    ------
    MemongerError
        If the block cannot be split, or nothing is left to plan.
    """
    graph = read(symbol)
    nodes = graph["nodes"]
    sparse = {name for name, array in arrays.items() if array.stype != "default"}
    operators = {i for i, node in enumerate(nodes) if node["op"] != "null"}
    makers = {
        i
        for i in operators
        if makes_rows(nodes[i]["op"], attributes(nodes[i]))
        or any(nodes[a]["name"] in sparse for a, *_ in nodes[i]["inputs"])
    }
    if not makers:
        return None
    front = set(makers)
    for i in reversed(range(len(nodes))):
        if i in front:
            front.update(a for a, *_ in nodes[i]["inputs"])
    trained = {name for name, source in parameters.items() if source.grad_req != "null"}
    depends = reached(nodes, trained)
    for i in sorted(front & operators - makers):
        op = nodes[i]["op"]
        if depends[i] or draws(op, attributes(nodes[i])):
            raise MemongerError(
                f"{nodes[i]['name']!r} ({op}) computes an input of an operator with a sparse "
                "gradient (sparse_grad) from parameters or random numbers, so that the operator "
                "cannot be split off the plan; set sparse_grad=False"
            )
    if not operators - front:
        raise MemongerError(
            "all its operators have sparse gradients (sparse_grad) or compute inputs of those that "
            "do, so that nothing is left to plan; set sparse_grad=False"
        )
    shapes = {name: array.shape for name, array in arrays.items()}
    types = {name: array.dtype for name, array in arrays.items()}
    same = merged(symbol, shapes, types)  # merged operators have one result
    alone = {same[i] for i in operators}
    for a, node in enumerate(nodes):  # the sum of two gradients does not depend on their order
        if node["name"] in parameters:
            readers = [i for i in alone for k, *_ in nodes[i]["inputs"] if k == a]
            early = sum(i in front for i in readers)
            if early and len(readers) > max(early, 2):
                raise MemongerError(
                    f"{node['name']!r} is read by operators with sparse gradients (sparse_grad) "
                    "and by others, whose gradients would add up in another order; set "
                    "sparse_grad=False"
                )
    reads = [*[nodes[i]["inputs"] for i in operators - front], graph["heads"]]
    read_entries = {(same[a], b) for entries in reads for a, b, *_ in entries if a in front}
    results = sorted(entry for entry in read_entries if entry[0] in operators)
    # The operators of a layer that is called twice have equal names, so results are numbered.
    names = [f"{nodes[a]['name']}_output{k}" for k, (a, _) in enumerate(results)]
    front_symbol = load_nodes(nodes, [[*entry, 0] for entry in results])
    place = {entry: k for k, entry in enumerate(results)}

    def moved(entries: Sequence[Sequence[int]]) -> list[list[int]]:
        """Translate entries to the rest, which begins with variables for the results."""
        moved = []
        for a, b, *_ in entries:
            a = same[a] if a in front else a
            moved.append([place[a, b], 0, 0] if (a, b) in place else [a + len(place), b, 0])
        return moved

    variables = [{"op": "null", "name": name, "inputs": []} for name in names]
    others = [{**node, "inputs": moved(node["inputs"])} for node in nodes]
    rest = load_nodes([*variables, *others], moved(graph["heads"]))
    return SplitBlock(front_symbol, rest, names)


class SplitOp(PlannedOp):
    """The operator of a split block: it runs the front by a CachedOp, and the rest by a plan."""

    def __init__(
        self,
        block: PlannedBlock,
        usual: mx.nd.CachedOp,
        symbol: Symbol,
        parameters: Mapping[str, Parameter],
        parts: SplitBlock,
        flags: Iterable[tuple[str, object]],
    ) -> None:
        def cached_op(part: Symbol) -> mx.nd.CachedOp:
            names = list(enumerate(part.list_inputs()))
            data = [k for k, name in names if name not in parameters]
            others = [k for k, name in names if name in parameters]
            indices = [("data_indices", data), ("param_indices", others)]
            return mx.nd.CachedOp(part, [*indices, *flags])

        front, rest, self._results = parts
        self._whole, self._all_names = usual, symbol.list_inputs()
        self._front, self._front_names = cached_op(front), front.list_inputs()
        names = rest.list_inputs()
        self._shared = set(self._front_names).intersection(names).difference(parameters)
        own = {name: source for name, source in parameters.items() if name in names}
        super().__init__(block, cached_op(rest), rest, own)

    def __getattr__(self, name: str) -> object:
        return getattr(self._whole, name)

    def __call__(self, *arrays: NDArray) -> object:
        if not mx.autograd.is_recording() or not mx.autograd.is_training():
            return self._whole(*arrays)
        named = dict(zip(self._all_names, arrays))
        for name in self._shared:
            if mark_of(named[name]).request != NULL:
                # The terms of its gradient would be added in another order.
                self._block.refuse(
                    f"input {name!r} needs a gradient, and operators with sparse gradients "
                    "(sparse_grad) read it as well as others; set sparse_grad=False"
                )
                return self._whole(*arrays)
        results = self._front(*[named[name] for name in self._front_names])
        results = [results] if isinstance(results, mx.nd.NDArray) else results
        named.update(zip(self._results, results))
        return super().__call__(*[named[name] for name in self._names])
