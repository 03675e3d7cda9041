"""Train a network and its plan from the same values, and compare them bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from html import escape
from itertools import count
from typing import TYPE_CHECKING, Collection, Dict, Iterator, Mapping, NamedTuple, Tuple

import numpy as np

from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import check_symbol, read_grad_req, read_pairs, trace
from memonger.graph.operators.recompute import ANY, GPU, on_one_device, waits_for_devices
from memonger.graph.read import forward_graph
from memonger.schedules.execution.executor import ScheduledExecutor
from memonger.schedules.execution.symbol import ScheduledSymbol, scheduled
from memonger.show.notebook import write_table
from memonger.solve.network import Network, read_network
from memonger.support.errors import MemongerError, check_count, mxnet_message
from memonger.support.mxnet import environment, mx
from memonger.support.parallel import progress_bar
from memonger.support.symbols import attributes, load_nodes, read
from memonger.support.types import Array1, NDArray, Shapes, Symbol, SymbolOrBlock
from memonger.support.versions import MXNET_ERRORS

if TYPE_CHECKING:
    Arrays = Dict[Tuple[int, str, str], Array1]  # by step, kind and name, as in `Difference`

#: Operators that expect whole numbers (an index, a class) as their first or second input.
INDEX_INPUTS = (
    "Embedding one_hot".split(),
    """CTCLoss SVMOutput SequenceLast SequenceMask SequenceReverse SoftmaxOutput batch_take
    gather_nd pick softmax_cross_entropy take""".split(),
)
RATES = {"lr": 0.01, "momentum": 0.9}


class Difference(NamedTuple):
    """An array that differs: in which step (from 0), of what kind, which, and by how much."""

    step: int
    kind: str  # 'output', 'gradient' or 'auxiliary state'
    name: str
    largest: float  # absolute difference; nan where either holds one


class CheckReport(NamedTuple):
    """The result of ``check``; true if the planned network is right.

    Attributes
    ----------
    steps, compared : int
        Training steps that were run, and arrays that were compared, all steps together.
    differences : tuple of Difference
        Step by step: outputs, gradients, auxiliary states.
    not_finite : tuple of str
        Arrays of the original network that hold infinities or not-a-number, by which nothing can
        be shown.
    repeatable : bool
        Whether the original network, run again from the same values, was equal to itself. Looked
        at only where something differs; with more than one OpenMP thread MXNet often is not.
    """

    steps: int
    compared: int
    differences: tuple[Difference, ...]
    not_finite: tuple[str, ...]
    repeatable: bool

    def __bool__(self) -> bool:
        return not self.differences and not self.not_finite

    def __repr__(self) -> str:
        return f"CheckReport({self})"

    def _repr_html_(self) -> str:
        if not self.differences:
            return f"<p>{escape(str(self))}</p>"
        head = ["step", "kind", "name", "largest difference"]
        rows = [[str(step), kind, name, f"{d:g}"] for step, kind, name, d in self.differences[:20]]
        return f"<p>{escape(str(self))}</p>{write_table(rows, head)}"

    def __str__(self) -> str:
        if self:
            return f"equal: {self.compared} arrays in {self.steps} steps, bit for bit"
        lines = []
        for step, kind, name, largest in self.differences[:1]:
            lines.append(
                f"{len(self.differences)} of {self.compared} arrays differ, first {kind} {name!r} "
                f"in step {step} (by {largest:g})"
            )
        if not self.repeatable:
            lines.append(
                "the original differs from itself too when run twice: set OMP_NUM_THREADS=1 before "
                "MXNet is imported"
            )
        if self.not_finite:
            lines.append("not finite in the original: " + ", ".join(self.not_finite[:5]))
        return "; ".join(lines)


def check(
    symbol: SymbolOrBlock,
    planned: SymbolOrBlock,
    shapes: Shapes,
    steps: int = 3,
    *,
    type_dict: Mapping[str, object] | None = None,
    ctx: object = None,
    grad_req: object = None,
    seed: int = 0,
    values: Mapping[str, object] | None = None,
) -> CheckReport:
    """Train a network and its plan from the same values and compare all they compute.

    Both train on one device: a SyncBatchNorm takes the statistics of this device alone.

    What a schedule has computed is read without waiting for it, as Module does; MXNet's own
    executors, of the network and of marks, do not order that (see ``docs/questions.md``).

    Parameters
    ----------
    symbol, planned : mx.sym.Symbol or mx.gluon.HybridBlock
        The network and its plan.
    shapes, type_dict
        Shapes and types of the inputs, as `plan` takes them.
    steps : int
        Training steps, with an SGD-momentum update between them.
    ctx : mx.Context, optional
        Where both are trained; the CPU by default.
    grad_req : str, list or dict
        As ``simple_bind`` takes it. By default as Module has it: 'write', but 'null' for the inputs
        named in ``shapes``.
    seed : int
        Of the values and of MXNet's random operators.
    values : dict, optional
        Arrays for inputs whose values matter; others are drawn, whole numbers 0 and 1 where an
        operator expects an index or a class.

    Returns
    -------
    CheckReport
        True if outputs, gradients and auxiliary states are equal byte for byte, and finite.

    Raises
    ------
    MemongerError
        If these are not the same network, or it cannot be trained with these shapes and values.

    Examples
    --------
    >>> assert memonger.check(net, planned, {'data': (2, 3, 32, 32)})
    """
    steps = check_count("steps", steps, 1)
    names = [*dict(read_pairs(shapes, {}, {}))]
    symbol, planned = trace(symbol, names), trace(planned, names)
    _check_same(symbol, planned)
    device = "cpu" if ctx is None or ctx == ANY else mx.gpu(0) if ctx == GPU else ctx
    request = read_network(symbol, shapes, type_dict=type_dict, ctx=device)
    inputs = request.spec.shapes
    if grad_req is None:
        grad_req = {name: "null" if name in inputs else "write" for name in request.grad_req}
    request = replace(request, grad_req=read_grad_req(list(request.grad_req), grad_req))
    graph = forward_graph(symbol, request.spec)
    start = _initial_values(graph, values or {}, inputs, seed)
    symbol, planned = _on_one_device(symbol), _on_one_device(planned)
    with progress_bar("memonger: training both") as progress:
        done = (progress(step / (2 * steps)) for step in count(1))
        train = partial(_train, request=request, start=start, steps=steps, seed=seed, done=done)
        expected = train(symbol)
        differences = _compare(expected, train(planned))
        infinite = [name for (*_, name), value in expected.items() if not np.isfinite(value).all()]
        not_finite = tuple(dict.fromkeys(infinite))
        report = CheckReport(steps, len(expected), tuple(differences), not_finite, repeatable=True)
        try:
            return report._replace(
                repeatable=not differences or not _compare(expected, train(symbol))
            )
        except KeyboardInterrupt:
            unknown = (
                "interrupted before the original was run again, to see whether it repeats itself"
            )
            raise KeyboardInterrupt(f"{unknown}; {report}") from None


def _check_same(symbol: Symbol, planned: Symbol) -> None:
    """Refuse symbols whose arguments, auxiliary states or outputs have other names."""
    check_symbol(symbol)
    check_symbol(planned)
    for kind in ("arguments", "auxiliary_states", "outputs"):
        names, others = (getattr(network, "list_" + kind)() for network in (symbol, planned))
        if names != others:
            some = ", ".join(sorted(set(names) ^ set(others))[:5]) or "in order"
            raise MemongerError(
                f"these are not the same network: their {kind.replace('_', ' ')} differ ({some})"
            )


def _on_one_device(net: Symbol) -> Symbol:
    """Return a network whose operators wait for no other device, with its schedule or marks."""
    graph = read(net)
    waiting = [
        node
        for node in graph["nodes"]
        if node["op"] != "null" and waits_for_devices(node["op"], attributes(node))
    ]
    if not waiting:
        return net
    for node in waiting:
        node["attrs"] = on_one_device(node["op"], attributes(node))
    alone = load_nodes(graph["nodes"], graph["heads"])
    schedule = net.schedule if isinstance(net, ScheduledSymbol) else None
    return alone if schedule is None else scheduled(alone, schedule)


def _initial_values(
    graph: ForwardGraph, values: Mapping[str, object], inputs: Collection[str], seed: int
) -> dict[str, Array1]:
    """Return a value for each variable, drawn where ``values`` has none."""
    nodes, random = graph.nodes, np.random.RandomState(seed)
    indices = {i for n in nodes for k, (i, _) in enumerate(n.inputs[:2]) if n.op in INDEX_INPUTS[k]}
    result = {}
    for i in list(graph.arguments) + sorted(graph.auxiliary):
        name, (shape, dtype, _) = nodes[i].name, graph.tensors[i][0]
        if name in values:
            value = np.asarray(values[name]).reshape(shape)
        elif i in graph.auxiliary or name.endswith("gamma"):
            value = random.uniform(0.5, 1.5, shape)
        elif i in indices or np.dtype(dtype).kind in "iu" or name.endswith("label"):
            value = random.randint(0, 2, shape)
        else:
            fan_in = 1 if name in inputs else max(1, int(np.prod(shape[1:])))
            value = random.uniform(-1, 1, shape) / np.sqrt(fan_in)
        result[name] = value.astype(dtype)
    return result


def _train(
    net: Symbol,
    request: Network,
    start: Mapping[str, Array1],
    steps: int,
    seed: int,
    done: Iterator[None],
) -> Arrays:
    """Train some steps, and return what each leaves: outputs, gradients, auxiliary states.

    ``done`` is advanced after each step.
    """
    ctx = request.device
    types = {name: start[name].dtype for name in request.grad_req}
    shapes = {name: start[name].shape for name in request.grad_req}
    arrays: Arrays = {}
    try:
        with environment():
            executor = net.simple_bind(ctx, request.grad_req, types, **shapes)
        args, aux = executor.arg_dict, executor.aux_dict
        for name, value in start.items():
            {**args, **aux}[name][:] = value
        grads = {n: gradient for n, gradient in executor.grad_dict.items() if gradient is not None}
        for gradient in grads.values():  # MXNet may add to it, write over it or leave it as it is
            gradient[:] = 0.125
        momentum = {n: mx.nd.zeros_like(args[n]) for n in grads}
        draw = np.random.RandomState(seed).uniform
        heads = [mx.nd.array(draw(-1, 1, o.shape), ctx, o.dtype) for o in executor.outputs]
        for step in range(steps):
            mx.random.seed(seed + step)
            executor.forward(is_train=True)
            executor.backward(heads)
            if not isinstance(executor, ScheduledExecutor):
                mx.nd.waitall()  # MXNet's engine does not order reads of states after they moved
            # The states are read before anything waits for the outputs.
            states = _read(step, "auxiliary state", aux)
            arrays.update(_read(step, "output", dict(zip(net.list_outputs(), executor.outputs))))
            arrays.update({**_read(step, "gradient", grads), **states})
            for n, gradient in grads.items():
                if n not in request.spec.shapes and np.dtype(gradient.dtype).kind == "f":
                    mx.nd.sgd_mom_update(args[n], gradient, momentum[n], **RATES, out=args[n])
            next(done)
        return arrays
    except MXNET_ERRORS as error:  # simple_bind raises another one than MXNetError
        raise MemongerError(f"the network cannot be run on {ctx}: {mxnet_message(error)}") from None


def _read(step: int, kind: str, arrays: Mapping[str, NDArray]) -> Arrays:
    """Copy arrays to NumPy, by step, kind and name."""
    return {(step, kind, name): array.asnumpy() for name, array in arrays.items()}


def _compare(expected: Arrays, arrays: Arrays) -> list[Difference]:
    """Return the arrays that differ, and by how much."""
    return [
        Difference(*key, float(np.max(np.abs(array.astype("f8") - arrays[key].astype("f8")))))
        for key, array in expected.items()
        if not np.array_equal(array, arrays[key])
    ]
