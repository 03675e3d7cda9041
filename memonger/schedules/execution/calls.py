"""Translate a training step into calls of MXNet's imperative interface, in order.

The compiled loop of an arena (`arena`) invokes them. Autograd records some (`operators.recorded`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Container, Mapping, NamedTuple, Sequence, Union

from memonger.graph.forward import RowEntry
from memonger.graph.operators.recompute import SYNCHRONIZED, is_restored, truth
from memonger.graph.operators.recorded import (
    ASYNCHRONOUS,
    COMPUTES_ALL,
    RECORDED_LATE,
    UNDECLARED_MUTATIONS,
)
from memonger.graph.operators.tensors import Attributes, Shape
from memonger.schedules.training_step import AT_ONCE, TrainingStep

#: An input or output of a call: a tensor of the step (a row and one of its outputs), or the array
#: of an argument's gradient (the name of the argument).
Place = Union[RowEntry, str]


class Invocation(NamedTuple):
    """A run of an operator: the compiled loop invokes it, or autograd records it."""

    row: int  # of the training step; -1: no row
    op: str
    attrs: Attributes
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    #: If it is recorded: of each input that gets a gradient, its number, the gradient, and whether
    #: it is added.
    gradients: tuple[tuple[int, RowEntry, bool], ...] | None = None


class Differentiated(NamedTuple):
    """The backward pass of an operator that was recorded."""

    row: int  # of the operator
    heads: tuple[tuple[int, Place], ...]  # numbers of outputs, and their gradients
    writes: tuple[Place, ...]
    late: Invocation | None = None  # the run that autograd records, if that is just before


Call = Union[Invocation, Differentiated]


class Calls(NamedTuple):
    """All calls of a training step, in order."""

    all: tuple[Call, ...]
    forward_calls: int  # how many of them belong to the forward pass


def calls_of(step: TrainingStep, on_gpu: bool, poisoned: bool = False) -> Calls:
    """Return the calls that run a training step.

    If ``poisoned``, tensors are overwritten once they are dead, which makes later reads visible.
    """
    graph, times = step.training.graph, step.rows.time
    again = set(step.rows.source[times > 0].tolist())
    recorded = {**step.recorded, **step.dropouts} if on_gpu else step.recorded
    read = {*zip(step.rows.read_row.tolist(), step.rows.read_output.tolist()), *step.heads}
    read.update(entry for entry in step.gradients if entry is not None)
    late: set[int] = set()  # the operators that are recorded just before their gradients
    runs: dict[int, int] = {}  # row that is recorded -> its operator
    ends: dict[int, int] = {}  # last row of the gradient of a recorded operator -> the operator
    inner: set[int] = set()  # all rows of these gradients
    gradients: dict[int, list[tuple[int, RowEntry]]] = {}
    for x, rows in recorded.items():
        if graph.nodes[x].op in RECORDED_LATE:
            late.add(x)
        else:
            runs[int(step.rows.latest[x])] = x
        ends[max(rows)] = x
        inner.update(rows)
        gradients[x] = _gradients(step, x, rows, read)
    sums, terms = _sums(step)
    dead = _poison(step) if poisoned else {}
    poison: list[Call] = []
    calls: list[Call] = []
    forward_calls = 0
    for row, signature in enumerate(step.signatures):
        if signature.op == "null":
            continue
        calls += terms.get(row, ())
        if row in ends and gradients[ends[row]]:
            x = ends[row]
            if x in late:
                calls.append(_differentiate_late(step, x, row, gradients[x]))
            else:
                calls += _differentiate(step, x, recorded[x], gradients[x])
        elif row not in inner:
            wanted = gradients[runs[row]] if row in runs else ()
            calls += _invoke(step, row, step.rows.source[row] in again, wanted)
        calls += sums.get(row, ())
        poison += dead.get(row, ())
        if row not in inner or row in ends:
            calls += poison
            poison = []
        if times[row] == 0:
            forward_calls = len(calls)
    elsewhere = step.parts.added | step.parts.left_out
    for a, gradient in zip(step.training.wanted, step.gradients):
        if gradient is not None and a not in elsewhere:
            block = step.block(gradient)
            if block >= 0 and not step.alive.of_caller[block]:
                calls.append(_copy(gradient, graph.nodes[a].name))
    return Calls(tuple(calls), forward_calls)


def _invoke(
    step: TrainingStep, row: int, is_recomputed: bool, wanted: Sequence[tuple[int, RowEntry]]
) -> Sequence[Call]:
    """Return the calls that run a row, with the gradients that autograd records.

    ``is_recomputed`` tells whether its operator runs again in the step.
    """
    signature, reads = step.signatures[row], step.reads[row]
    op, attrs = signature.op, dict(signature.attrs)
    if op == "Dropout" and is_recomputed:
        # cuDNN's mask has bits instead of factors (src/operator/nn/dropout-inl.h).
        attrs["cudnn_off"] = "True"
    elif op == "_zeros_without_dtype":  # its shape cannot be inferred
        attrs["shape"] = str(tuple(signature.tensors[0].shape))
    writes = tuple([(row, k) for k in range(len(signature.tensors))])
    usual = Invocation(row, op, attrs, tuple(reads), writes)
    if wanted or op in ASYNCHRONOUS:
        adds = [(k, entry, entry in step.adding) for k, entry in wanted]
        return [usual._replace(gradients=tuple(adds))]
    if step.rows.time[row] > 0 and op == SYNCHRONIZED and is_restored(op, attrs):
        return _restore(usual, signature.tensors[1].shape)
    states = [reads[k] for k in UNDECLARED_MUTATIONS.get(op, ())]
    return [*_by_name(usual), *[_copy(state, state) for state in states]]


def _copy(source: Place, target: Place) -> Invocation:
    return Invocation(-1, "_copy", {}, (source,), (target,))


def _poison(step: TrainingStep) -> Mapping[int, Sequence[Call]]:
    """Return, by row, the calls that overwrite the blocks of the arena that die after the row."""
    tensors: dict[int, RowEntry] = {}  # the last tensor of each block
    for row, signature in enumerate(step.signatures):
        for k in range(len(signature.tensors)):
            tensors[step.block((row, k))] = row, k
    dead: dict[int, list[Call]] = defaultdict(list)
    for block, entry in tensors.items():
        if block >= 0 and not step.alive.of_caller[block]:
            tensor = step.tensor(entry)
            value = "nan" if tensor.dtype.startswith("float") else "77"
            attrs = {"shape": str(tensor.shape), "dtype": tensor.dtype, "value": value}
            dead[int(step.alive.stop[block])].append(Invocation(-1, "_full", attrs, (), (entry,)))
    return dead


def _sums(step: TrainingStep) -> list[dict[int, list[Call]]]:
    """Return, by row, the additions to arrays of gradients: those after a row, those before one.

    Sums of more than four terms are added to the array term by term, as MXNet does
    (``ElementWiseSumCompute_`` with the request 'add', in ``src/operator/tensor/elemwise_sum.h``).
    """
    after: dict[int, list[Call]] = defaultdict(list)
    before: dict[int, list[Call]] = defaultdict(list)
    added = step.parts.added - step.parts.left_out
    for a, entry in zip(step.training.wanted, step.gradients):
        if entry is not None and a in added and entry not in step.adding:
            row, name = entry[0], step.training.graph.nodes[a].name
            terms = step.reads[row]
            one_by_one = step.ops[row] == "add_n" and len(terms) > AT_ONCE
            (before if one_by_one else after)[row] += [
                Invocation(-1, "_grad_add", {}, (name, term), (name,))
                for term in (terms if one_by_one else [entry])
            ]
    return [after, before]


def _gradients(
    step: TrainingStep, x: int, rows: Sequence[int], read: Container[RowEntry]
) -> list[tuple[int, RowEntry]]:
    """Return the inputs of a recorded operator whose gradients are read, with these gradients.

    If the operator computes all gradients, all are returned: MXNet would allocate memory for those
    that have no place in the arena.
    """
    references = enumerate(step.training.gradients[x].gradients)
    nodes = [(k, (rows[r[1]], r[2])) for k, r in references if r is not None and r[0] == "node"]
    all_of = step.training.graph.nodes[x].op in COMPUTES_ALL
    return [(k, entry) for k, entry in nodes if entry in read or all_of]


def _differentiate(
    step: TrainingStep, x: int, rows: Sequence[int], gradients: Sequence[tuple[int, RowEntry]]
) -> list[Call]:
    """Return the calls of a recorded operator's backward pass; ``rows`` are those of its gradient.

    The backward pass may change the auxiliary states of the operator, though it does not declare
    so. If the last run of the operator has its own copies of the states, they are copied from the
    states before the backward pass and back after it. So the states are updated once, whether the
    forward pass (cuDNN) or the backward pass does it.
    """
    graph, first, latest = step.training.graph, step.rows.first[x], int(step.rows.latest[x])
    inputs = zip(graph.nodes[x].inputs, step.reads[first], step.reads[latest])
    states = [(state, own) for (a, _), state, own in inputs if a in graph.auxiliary]
    heads: dict[int, Place] = {}
    for row, node in zip(rows, step.training.gradients[x].nodes):
        for (kind, k, _), entry in zip(node.inputs, step.reads[row]):
            if row >= 0 and kind == "head":
                heads[k] = entry
    writes = tuple([entry for _, entry in gradients])
    return [
        *[_copy(state, own) for state, own in states if state != own],
        Differentiated(latest, tuple(heads.items()), writes),
        *[_copy(own, state) for state, own in states],
    ]


def _differentiate_late(
    step: TrainingStep, x: int, row: int, gradients: Sequence[tuple[int, RowEntry]]
) -> Differentiated:
    """Return the backward pass of an operator that autograd records just before it.

    ``row`` is that of the gradient. The run has the statistics of the first run as its outputs, and
    writes over the gradient of its data what nobody reads.
    """
    first = int(step.rows.first[x])
    reads = dict(zip(step.training.gradients[x].nodes[0].inputs, step.reads[row]))
    run = Invocation(
        row,
        step.signatures[first].op,
        step.signatures[first].attrs,
        (reads["in", 0, 0], *step.reads[first][1:]),
        ((row, 0), (first, 1), (first, 2)),
        tuple([(k, entry, False) for k, entry in gradients]),
    )
    writes = tuple([entry for _, entry in gradients])
    return Differentiated(row, ((0, reads["head", 0, 0]),), writes, run)


def _restore(usual: Invocation, shape: Shape) -> list[Invocation]:
    """Return invocations that compute the output of a SyncBatchNorm from its statistics.

    They round as ``src/operator/contrib/sync_batch_norm-inl.h`` does. The other outputs, of this
    shape, are scratch memory.
    """
    (data, gamma, beta, mean, variance), (out, one, other) = usual.reads, usual.writes

    def run(op: str, reads: tuple[Place, ...], write: Place, **attrs: object) -> Invocation:
        texts = {name: str(value) for name, value in attrs.items()}
        return Invocation(usual.row, op, texts, reads, (write,))

    slope = [
        run("Reshape", (gamma,), other, shape=shape),
        run("broadcast_mul", (other, out), out),
    ]
    return [
        run("Reshape", (mean,), one, shape=shape),
        run("broadcast_sub", (data, one), out),
        *([] if truth(usual.attrs.get("fix_gamma", "True")) else slope),
        run("Reshape", (variance,), one, shape=shape),
        run("_plus_scalar", (one,), one, scalar=usual.attrs.get("eps", "1e-3")),
        run("sqrt", (one,), one),
        run("broadcast_div", (out, one), out),
        run("Reshape", (beta,), other, shape=shape),
        run("broadcast_add", (out, other), out),
    ]


def _by_name(usual: Invocation) -> list[Invocation]:
    """Return invocations that compute the same as an operator that cannot be invoked by name."""
    row, op, attrs, reads, writes = usual[:5]
    if op == "_backward_Dropout":  # without cuDNN, the mask contains factors
        if float(attrs.get("p", 0.5)) == 0:
            return [Invocation(row, "_copy", {}, reads[:1], writes)]
        product = "broadcast_mul" if attrs.get("axes", "()") not in ("()", "[]") else "elemwise_mul"
        return [Invocation(row, product, {}, reads[:2], writes)]
    if op == "_backward_SliceChannel":
        axis, count = attrs.get("axis", "1"), str(len(reads))
        if truth(attrs.get("squeeze_axis")):
            return [Invocation(row, "stack", {"axis": axis, "num_args": count}, reads, writes)]
        return [Invocation(row, "Concat", {"dim": axis, "num_args": count}, reads, writes)]
    if op == "_backward_softmax_cross_entropy":
        # A recorded one would keep the data of its first run (src/operator/loss_binary_op-inl.h).
        (head, data, label), (gradient, _) = reads, writes
        return [
            Invocation(row, "SoftmaxOutput", {}, (data, label), (gradient,)),
            Invocation(row, "_backward_SoftmaxOutput", {}, (gradient, label), writes),
            Invocation(row, "broadcast_mul", {}, (gradient, head), (gradient,)),
        ]
    return [usual]
