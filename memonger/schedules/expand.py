"""Expand a schedule into a training step: a row for each operator that runs.

``graph.training`` has the rows that MXNet's executor makes of a network. Here they run in the order
of a schedule, and an operator may run any number of times. `make_parts` makes the data shared by
the steps of all schedules of a network, and `build_step` makes the step of one.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from itertools import chain
from typing import Collection, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.layouts import PLAIN, UsualLayouts, find_usual_layouts
from memonger.costs.pool import find_added_in_place, pool
from memonger.graph.arrays import Signature, Signatures, gather, join_columns, list_reads
from memonger.graph.forward import FLOAT, ForwardGraph, RowEntry, no_collection
from memonger.graph.operators.added import is_fixed_gamma
from memonger.graph.operators.gradients import ZEROS
from memonger.graph.operators.inplace import reads_overwritten
from memonger.graph.operators.layouts import AXES, PRODUCES_BLOCKED
from memonger.graph.operators.recompute import SYNCHRONIZED, truth
from memonger.graph.operators.recorded import BY_MKLDNN, RECORDED_LATE, is_recorded
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import HEAD_COPY, TrainingGraph, training_graph
from memonger.schedules.layouts import find_inserts, find_overwriting, refusal
from memonger.schedules.rows import NodeVariants, Rows
from memonger.schedules.schedule import FIRST_TIME, Schedule, Workload, adapt, check, workload
from memonger.schedules.training_step import (
    AT_ONCE,
    Parts,
    TrainingStep,
    hold_for_autograd,
    insert,
    keep_places,
    lay_out_plainly,
    make_step,
)
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled

log = logging.getLogger("memonger")

#: Gradients that MXNet never writes: of labels.
UNWRITTEN = {(f"_backward_{op}_reg_out", 1) for op in ("linear", "logistic", "mae")}
UNWRITTEN |= {("_backward_SoftmaxOutput", 1)}

ROUNDS = 8  # of inserting operators for layouts; each may change the layouts of later rows


class _RowFacts(NamedTuple):
    """The rows of the training graph of a workload, as lists with an element for each row."""

    work: Workload
    training: TrainingGraph
    mkldnn: bool
    owner: list[int]  # the operator whose gradient the row is part of; -1: none
    reads: list[list[RowEntry]]  # the reads of the row, without identities of ``handed_on``
    walk: list[int]  # gradient rows, in the order in which MXNet runs them
    #: MXNet inserts identities before gradients of outputs, which take memory. They do not run
    #: here: output of an identity -> its input, which rows read instead.
    handed_on: dict[RowEntry, RowEntry]
    #: For each node whether it is a Dropout with a mask. When it is recomputed, a product of its
    #: input and the mask of its first run takes its place.
    masked: list[bool]


@no_collection()
def make_parts(work: Workload, added: Collection[int] = (), mkldnn: bool = True) -> Parts:
    """Return the data shared by the training steps of all schedules of a network.

    Parameters
    ----------
    work : Workload
        The network.
    added : collection of int
        Arguments with grad_req 'add'.
    mkldnn : bool
        Whether MKLDNN may compute the step.
    """
    facts = _read_rows(work, mkldnn)
    training, t = work.training, work.training.arrays
    unwritten = find_unwritten_biases(training) if mkldnn else set()
    refusal = why_wrong(training, unwritten)
    gradients, left_out, zeroed = _find_gradients(facts, set() if refusal else unwritten)
    chained = _find_chained(facts)
    recorded, adding = _find_recorded(facts, added, gradients, chained)
    rows, signatures, again = _make_variants(facts, recorded)
    variable = np.array([signature.op == "null" for signature in signatures])[rows.signature]
    n = t.forward_nodes
    variable[n : 2 * n] = variable[again : again + n] = False
    operation_start, operation_row = join_columns(_gradient_rows(facts), 1)
    heads = [head for head in training.graph.heads if not t.variable[head[0]]]
    _, head_row, head_output = join_columns([heads], 2)
    overwriting = [r for r in facts.walk if reads_overwritten(*training.signatures[r][:2])]
    blocked = mkldnn and any(node.op in PRODUCES_BLOCKED for node in training.graph.nodes)
    usual = None
    in_place: dict[int, bool] = {}
    if blocked or overwriting:
        block = pool(training, np.zeros(n, dtype=np.bool_)).block
        usual = find_usual_layouts(training, scoring=True) if blocked else None
        in_place = dict.fromkeys(find_overwriting(training, usual) if usual else (), True)
        for row in overwriting:
            source, k = int(t.read_row[t.read_start[row]]), int(t.read_output[t.read_start[row]])
            read, written = block[t.output_start[[source, row]] + [k, 0]]
            in_place[row] = bool(read == written >= 0)
    if usual is not None and not refusal:
        refusal = _why_blocked(training, usual, added)
    return Parts(
        work=work,
        mkldnn=mkldnn,
        variants=NodeVariants(
            rows=rows,
            forward_nodes=n,
            again=again,
            variable=np.flatnonzero(variable).astype(np.int32),
            operation_start=operation_start,
            operation_row=operation_row,
            head_row=head_row,
            head_output=head_output,
        ),
        signatures=tuple(signatures),
        gradients=tuple(gradients),
        added=frozenset(added),
        recorded=recorded,
        adding=adding.union(chained),
        chained=chained,
        left_out=left_out,
        zeroed=zeroed,
        in_place=in_place,
        usual=usual,
        refusal=refusal,
    )


def _why_blocked(training: TrainingGraph, usual: UsualLayouts, added: Collection[int]) -> str:
    """Return of which sum that is added to an array all terms may be in blocks; '' if of none.

    MXNet then adds the sum by MKLDNN, otherwise term by term (``ElementWiseSumComputeExCPU`` in
    ``src/operator/tensor/elemwise_sum.cc``).
    """
    t, nodes = training.arrays, training.graph.nodes
    for a, row in zip(training.wanted, t.head_row[t.outputs :].tolist()):
        reads = usual.read[t.read_start[row] : t.read_start[row + 1]]
        is_sum = training.ops[row] == "add_n" and len(reads) > AT_ONCE
        if a in added and is_sum and (reads != PLAIN).all():
            return (
                f"the gradient of {nodes[a].name!r} (grad_req 'add') has {len(reads)} terms, which "
                "MKLDNN may lay out in blocks, so that a schedule may add them in another order; "
                "give it grad_req 'write', set MXNET_MKLDNN_ENABLED=0, or plan with how='marks'"
            )
    return ""


def _read_rows(work: Workload, mkldnn: bool) -> _RowFacts:
    """Return the facts about the rows of a workload."""
    training, t = work.training, work.training.arrays
    reads = list_reads(t.read_start, t.read_row, t.read_output)
    owner = [-1] * (2 * t.forward_nodes) + training.origin[2 * t.forward_nodes :].tolist()
    walk = [r for r in t.walk_row.tolist() if r >= 2 * t.forward_nodes]
    handed_on = {
        (row, 0): reads[row][0] for row in walk if training.ops[row] == HEAD_COPY and owner[row] < 0
    }
    for row_reads in reads[2 * t.forward_nodes :]:
        row_reads[:] = [handed_on.get(entry, entry) for entry in row_reads]
    nodes = training.graph.nodes
    masked = [n.op == "Dropout" and float(n.attrs.get("p", 0.5)) > 0 for n in nodes]
    return _RowFacts(work, training, mkldnn, owner, reads, walk, handed_on, masked)


def _find_gradients(
    facts: _RowFacts, unwritten: Collection[RowEntry]
) -> tuple[list[RowEntry | None], frozenset[int], frozenset[int]]:
    """Return the entry of the gradient of each argument, or None if the gradient is zero.

    The entries are those that copies read. The second result has the arguments whose gradient MXNet
    does not write, and the third those of which MKLDNN writes zeros even where it should add.
    """
    training, t = facts.training, facts.training.arrays
    gradients: list[RowEntry | None] = []
    left_out, zeroed = set(), set()
    rows = t.head_row[t.outputs :]
    outputs = t.head_entry[t.outputs :] - t.output_start[rows]
    for a, entry in zip(training.wanted, zip(rows.tolist(), outputs.tolist())):
        name = training.graph.nodes[a].name
        if training.names[entry[0]] == name + "_copy":
            entry = facts.reads[entry[0]][0]
        entry = facts.handed_on.get(entry, entry)
        signature = training.signatures[entry[0]]
        if entry in unwritten:
            left_out.add(a)
            log.warning(
                "%r gets no gradient, with or without a schedule, because MKLDNN computes none for "
                "a bias whose weight gets none; set MXNET_MKLDNN_ENABLED=0 to train this bias",
                name,
            )
        elif (signature.op, entry[1]) in UNWRITTEN:
            left_out.add(a)
        elif facts.mkldnn and is_fixed_gamma(signature.op, signature.attrs, entry[1]):
            if signature.tensors[0].dtype == FLOAT:
                zeroed.add(a)
        is_zero = signature.op == "_zeros_without_dtype" or a in zeroed
        gradients.append(None if is_zero else entry)
    return gradients, frozenset(left_out), frozenset(zeroed)


def find_unwritten_biases(training: TrainingGraph) -> set[RowEntry]:
    """Find gradients of biases that MKLDNN does not write because their weights get none."""
    # src/operator/nn/mkldnn/mkldnn_fully_connected.cc
    t = training.arrays
    reads = list_reads(t.read_start, t.read_row, t.read_output)
    walk = [row for row in t.walk_row.tolist() if row >= 2 * t.forward_nodes]
    read_counts = training.unmarked.reads
    unwritten = set()
    for row in (row for row in walk if training.ops[row] == "_backward_FullyConnected"):
        head, output = reads[row][0]
        tensor = training.signatures[head].tensors[output]
        by_mkldnn = tensor.dtype == FLOAT and len(tensor.shape) <= AXES
        _, weight, *bias = read_counts[slice(*t.output_start[row : row + 2])]
        if by_mkldnn and weight == 0 and any(bias):
            unwritten.add((row, 2))
    return unwritten


def why_wrong(training: TrainingGraph, unwritten: set[RowEntry]) -> str:
    """Return which gradient of `find_unwritten_biases` is a term of a sum; '' if none is.

    The sum would depend on what the memory of this term holds.
    """
    if not unwritten:
        return ""
    t = training.arrays
    reads, _ = gather(t.read_start, t.walk_row[t.walk_row >= 2 * t.forward_nodes])
    read = {*zip(t.read_row[reads].tolist(), t.read_output[reads].tolist())}
    for row, _ in sorted(unwritten & read):
        name = training.graph.nodes[training.origin[row]].name
        return (
            f"the bias of {name!r} is used more than once, and its gradient would be wrong, "
            "with or without a plan, because MKLDNN computes none for a bias whose weight gets "
            "none; give the bias grad_req 'null' too, or set MXNET_MKLDNN_ENABLED=0"
        )
    return ""


def _find_chained(facts: _RowFacts) -> dict[RowEntry, int]:
    """Find the terms that are added to a sum in place, if an addition afterwards may differ.

    Returns the row that would add each term. It is found for all operators but MKLDNN's, and those
    whose run writes over the sum: other kernels may round an addition together with a product.
    """
    training = facts.training
    nodes = training.graph.nodes
    chained: dict[RowEntry, int] = {}
    if training.graph.adds_afterwards:
        return chained
    for (term, k), row in find_added_in_place(training).items():
        x = facts.owner[term]
        by_mkldnn = facts.mkldnn and training.signatures[term].tensors[k].dtype == FLOAT
        op = nodes[x].op
        is_alone = op in RECORDED_LATE or (by_mkldnn and op in BY_MKLDNN)
        if x >= 0 and not facts.masked[x] and not is_alone:
            chained[term, k] = row
    return chained


def _find_recorded(
    facts: _RowFacts,
    added: Collection[int],
    gradients: Sequence[RowEntry | None],
    chained: Collection[RowEntry],
) -> tuple[dict[int, list[int]], frozenset[RowEntry]]:
    """Find the operators whose gradient autograd computes (``operators.recorded``), and its rows.

    They include operators whose gradient is added to an array of the caller. Some operators start
    the sum from the array, so that an addition afterwards may round differently. (No operator with
    auxiliary states does, and recomputed ones have scratch states.) The second result has these
    gradients.
    """
    training, owner = facts.training, facts.owner
    nodes, auxiliary = training.graph.nodes, training.graph.auxiliary
    reads = Counter(chain(gradients, *(facts.reads[row] for row in facts.walk)))
    rows = defaultdict(list)
    for row in range(2 * training.arrays.forward_nodes, len(owner)):
        rows[owner[row]].append(row)
    run = {owner[row] for row in facts.walk} - {-1}
    recorded = {x for x in run if is_recorded(nodes[x].op, training.gradients[x])}
    recorded |= {owner[row] for row, _ in chained}
    adding = set()
    for a, entry in zip(training.wanted, gradients):
        if a in added and entry is not None and reads[entry] == 1:
            x = owner[entry[0]]
            signature = training.signatures[entry[0]]
            if x < 0 or signature.op in ZEROS or reads_overwritten(signature.op, signature.attrs):
                continue
            states = any(i in auxiliary for i, _ in nodes[x].inputs)
            if not states and not facts.masked[x]:
                recorded.add(x)
                adding.add(entry)
    return {x: rows[x] for x in sorted(recorded)}, frozenset(adding)


def _make_variants(
    facts: _RowFacts, recorded: Collection[int]
) -> tuple[Rows, list[Signature], int]:
    """Return the variants of `NodeVariants`, their signatures, and the first that runs again."""
    training, t = facts.training, facts.training.arrays
    graph, n = training.graph, t.forward_nodes
    signatures = Signatures([*{id(each): each for each in training.signatures}.values()])
    first_time = [FIRST_TIME.get(node.op, ()) for node in graph.nodes]
    number = {id(signature): k for k, signature in enumerate(signatures.all)}
    variants: list[tuple[int, int, int, list[RowEntry]]] = []  # signature, source, time, reads
    for row, reads in enumerate(facts.reads):
        signature = training.signatures[row]
        k = number[id(signature)]
        reads = [(~r if r < n and j in first_time[r] else r, j) for r, j in reads]
        # Gradients that autograd computes are in new arrays. Autograd also computes the gradient of
        # a Dropout on a GPU, if the Dropout runs once.
        is_dropout = signature.op == "_backward_Dropout" and not facts.mkldnn
        if signature.options and (facts.owner[row] in recorded or is_dropout):
            k = signatures.add(signature._replace(options=()))
        elif signature.op == "_zeros_without_dtype" and signature.tensors[0].dtype == "int32":
            # The gradient of MKLDNN's workspace, over which Pooling writes its own, of floats.
            (tensor,) = signature.tensors
            k = signatures.add(signature._replace(tensors=(tensor._replace(dtype=FLOAT),)))
        variants.append((k, row, 0 if row < n and not t.variable[row] else -1, reads))
    again = []
    scratch: dict[tuple[int, Tensor], RowEntry] = {}
    for x, (k, source, time, reads) in enumerate(variants[:n]):
        reads, op, attrs = [*reads], graph.nodes[x].op, graph.nodes[x].attrs
        if facts.masked[x]:  # it reads its data and its mask only
            result, mask = graph.tensors[x][:2]
            product = "elemwise_mul" if result.shape == mask.shape else "broadcast_mul"
            k = signatures(product, {}, 2, (result,))
            reads = [reads[0], (~x, 1)]
        elif truth(attrs.get("use_global_stats")):
            pass  # no state is updated
        elif op == SYNCHRONIZED:  # its statistics take the place of its states
            result, mean, _ = graph.tensors[x]
            small = mean._replace(shape=(1, *mean.shape, *[1] * (len(result.shape) - 2)))
            k = signatures(op, attrs, len(reads), (result, small, small))
            reads[-2:] = (~x, 1), (~x, 2)
        else:
            # Scratch states, because cuDNN's BatchNorm updates its states whenever it runs.
            for j, (state, _) in enumerate(reads):
                if state in graph.auxiliary:
                    key = j, graph.tensors[state][0]
                    if key not in scratch:
                        scratch[key] = len(variants), 0
                        variants.append((signatures("null", {}, 0, (key[1],)), -1, -1, []))
                    reads[j] = scratch[key]
        again.append((k, source, time, reads))
    *columns, reads_of_all = zip(*variants, *again)
    nothing = np.zeros(0, dtype=np.int32)  # variants have no runs
    rows = Rows(
        *(np.array(column, dtype=np.int32) for column in columns),
        *join_columns(reads_of_all, 2),
        first=nothing,
        latest=nothing,
    )
    return rows, signatures.all, len(variants)


def _gradient_rows(facts: _RowFacts) -> list[list[int]]:
    """List for each forward node the gradient rows that run in the operation of its gradient.

    A sum runs with the last of its terms, and a row without inputs with its first reader.
    """
    work, reads, t = facts.work, facts.reads, facts.training.arrays
    place = {x: k for k, x in enumerate(work.gradients)}
    rows: list[list[int]] = [[] for _ in range(t.forward_nodes)]
    runs = (r for r in facts.walk if not t.variable[r] and (r, 0) not in facts.handed_on)
    walk = [*runs] if place else []
    operation: dict[int, int] = {}
    for row in sorted(walk):
        sources = [r for r, _ in reads[row]]
        last = max((operation.get(r, 0) for r in sources), default=len(place) - 1)
        operation[row] = place.get(facts.owner[row], last)
        for r in sources:
            if r in operation and not reads[r]:
                operation[r] = min(operation[r], operation[row])
    for row in walk:  # in the order in which MXNet would run them
        rows[work.gradients[operation[row]]].append(row)
    return rows


def build_step(parts: Parts, schedule: Schedule) -> TrainingStep:
    """Return the training step of a valid schedule (``schedule.check``).

    Where MKLDNN may compute it, operators are inserted until all layouts are those without a
    schedule.

    Raises
    ------
    MemongerError
        If no schedule can run the network (``Parts.refusal``), or MKLDNN would round differently.
    """
    if parts.refusal:
        raise MemongerError(parts.refusal)
    operations = np.ascontiguousarray(schedule.operations, dtype=np.int32)
    rows, signatures = compiled.make_rows(parts.variants, operations), Signatures(parts.signatures)
    if parts.mkldnn:
        rows = lay_out_plainly(parts, rows, signatures)
    rows = hold_for_autograd(parts, rows, signatures)
    step = keep_places(make_step(parts, rows, signatures.all), signatures)
    if parts.usual is None:
        return step
    for k in range(ROUNDS + 1):
        inserts = find_inserts(step, parts.usual, step.rows.source, step.alive.block)
        if not inserts:
            break
        if k == ROUNDS:
            raise refusal(step, next(iter(inserts)))
        step = insert(step, signatures, inserts)
    return step


def step_for(
    graph: ForwardGraph, schedule: Schedule, requests: Mapping[str, str], mkldnn: bool
) -> TrainingStep:
    """Return the training step of a network, with the operations of a schedule that apply to it.

    Parameters
    ----------
    graph : ForwardGraph
        The network.
    schedule : Schedule
        A schedule, perhaps for other gradients.
    requests : mapping
        Name of an argument -> its grad_req.
    mkldnn : bool
        Whether MKLDNN may compute the step.
    """
    request = {a: requests[graph.nodes[a].name] for a in graph.arguments}
    work = workload(training_graph(graph, [a for a in request if request[a] != "null"]))
    fitting = adapt(work, schedule)
    check(work, fitting)
    added = [a for a in request if request[a] == "add"]
    return build_step(make_parts(work, added, mkldnn), fitting)
