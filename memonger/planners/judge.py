"""What a schedule costs, in compiled code: its training graph, MXNet's order, MXNet's memory.

The graph is the one that is written out for MXNet (``rows``), the order and the memory are those of
the replay (``tables``, ``allocator``). Here they are put together without a Python object for each
node, so that a search can judge thousands of schedules.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from memonger.allocator import allocate
from memonger.compiled import compiled
from memonger.flops import forward_flops
from memonger.planners.unroll import Steps
from memonger.rows import ITSELF, MASKED, READER, Template, rows_of
from memonger.schedule import Workload
from memonger.tables import KEPT, RowKind, largest_first, starts, walk
from memonger.training_step import Parts

#: Operators whose results are worth keeping where others are computed again.
COSTLY = frozenset(
    "Convolution Deconvolution FullyConnected dot batch_dot RNN Correlation _linalg_gemm "
    "_linalg_gemm2 _contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution "
    "_contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt "
    "_contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt".split()
)


ONE_PASS = 1e9  # the work of one forward pass where it is not counted in FLOPs


class Kinds(NamedTuple):
    """The kinds of rows (``RowKind``) as arrays; ``*_start`` has one more element than there are.

    Attributes
    ----------
    of_row, of_masked, of_reader, of_scratch : np.ndarray
        The kind of each template row, and of what stands for it (``training_step.Parts``).
    variable : np.ndarray of bool
    output_start : np.ndarray
    rank : np.ndarray
        Of each output the place of its size in ``sizes``.
    size, dtype : np.ndarray
        Of each output: two of the same size have equal numbers; so do two of the same type.
    made : np.ndarray
        The outputs of each kind in the order in which they get memory.
    ignored_start, ignored : np.ndarray
        For each input whether it is read for its shape alone.
    option_start, option_input, option_output, option_identity : np.ndarray
    sizes : np.ndarray
        Bytes, 4 to an element, ascending.
    """

    of_row: np.ndarray
    of_masked: np.ndarray
    of_reader: np.ndarray
    of_scratch: np.ndarray
    variable: np.ndarray
    output_start: np.ndarray
    rank: np.ndarray
    size: np.ndarray
    dtype: np.ndarray
    made: np.ndarray
    ignored_start: np.ndarray
    ignored: np.ndarray
    option_start: np.ndarray
    option_input: np.ndarray
    option_output: np.ndarray
    option_identity: np.ndarray
    sizes: np.ndarray


class Blueprint(NamedTuple):
    """A network, ready to be scheduled in compiled code.

    Attributes
    ----------
    steps : Steps
    template : Template
    kinds : Kinds
    gradient_row, gradient_output : np.ndarray
        The outputs of the training symbol that are gradients (template rows), each once.
    node : np.ndarray
        The forward node of each position.
    """

    steps: Steps
    template: Template
    kinds: Kinds
    gradient_row: np.ndarray
    gradient_output: np.ndarray
    node: np.ndarray


def blueprint(made: Parts, weights: Optional[np.ndarray] = None) -> Blueprint:
    """Make the arrays for a network.

    Parameters
    ----------
    made : Parts
    weights : np.ndarray, optional
        The work of each forward node, in any unit; by default its FLOPs.
    """
    workload = made.work
    gradients = list(dict.fromkeys(entry for entry in made.gradients if entry is not None))
    asked = np.array(gradients, dtype=np.int32).reshape(-1, 2)
    node = np.array(workload.operators, dtype=np.int32)
    return Blueprint(
        _steps(workload, positions(node, len(workload.once)), weights),
        made.template,
        _kinds(made),
        np.ascontiguousarray(asked[:, 0]),
        np.ascontiguousarray(asked[:, 1]),
        node,
    )


def positions(node: np.ndarray, nodes: int) -> np.ndarray:
    """The position of each forward node, -1 where it never runs."""
    position = np.full(nodes, -1, dtype=np.int32)
    position[node] = np.arange(len(node))
    return position


def _kinds(made: Parts) -> Kinds:
    kinds: List[RowKind] = made.kinds
    tensors = [tensor for kind in kinds for tensor in kind.tensors]
    elements = np.array([tensor.elements for tensor in tensors], dtype=np.int64)
    itemsize = np.array([np.dtype(tensor.dtype).itemsize for tensor in tensors], dtype=np.int64)
    sizes, rank = np.unique(4 * elements, return_inverse=True)
    _, size = np.unique(elements * 16 + itemsize, return_inverse=True)
    start = starts([len(kind.tensors) for kind in kinds]).astype(np.int32)
    options = [option for kind in kinds for option in kind.options]
    return Kinds(
        made.kind_of,
        made.masked_kind,
        made.reader_kind,
        made.scratch_kind,
        np.array([kind.op == "null" for kind in kinds], dtype=np.bool_),
        start,
        rank.astype(np.int32),
        size.astype(np.int32),
        np.array([np.dtype(tensor.dtype).num for tensor in tensors], dtype=np.int32),
        largest_first(start, elements).astype(np.int32),
        starts([kind.inputs for kind in kinds]).astype(np.int32),
        np.array([k in kind.ignored for kind in kinds for k in range(kind.inputs)], dtype=np.bool_),
        starts([len(kind.options) for kind in kinds]).astype(np.int32),
        np.array([option[0] for option in options], dtype=np.int32),
        np.array([option[1] for option in options], dtype=np.int32),
        np.array([option[2] for option in options], dtype=np.bool_),
        sizes.astype(np.int64),
    )


def grouped(pairs: Sequence[Tuple[int, int]], groups: int) -> Tuple[np.ndarray, np.ndarray]:
    """(group, value) pairs by group: where each group starts, and the values, in their order."""
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    start = starts(np.bincount(array[:, 0], minlength=groups))
    order = np.argsort(array[:, 0], kind="stable")
    return start.astype(np.int32), array[order, 1].astype(np.int32)


def _steps(workload: Workload, position: np.ndarray, weights: Optional[np.ndarray]) -> Steps:
    graph = workload.training.graph
    operators = workload.operators
    count = len(operators)
    reads = [(p, position[j]) for p, i in enumerate(operators) for j in workload.inputs[i]]
    gradient = np.zeros(count, dtype=np.bool_)
    gradient[position[list(workload.gradients)]] = True
    wants = [(p, position[j]) for p, i in enumerate(operators) for j in workload.reads[i]]
    last = np.full(count, -1, dtype=np.int32)
    for p, j in reads:
        last[j] = p
    first_want = np.full(count, count, dtype=np.int32)
    for p, j in wants:
        first_want[j] = min(first_want[j], p)
    head = np.zeros(count, dtype=np.bool_)
    head[[position[workload.training.same[a]] for a, _ in graph.heads]] = True
    nodes = list(operators)
    work = forward_flops(graph)[nodes].astype(np.float64)
    if weights is not None:
        # Whole numbers: their sums do not depend on the order.
        work = np.ceil(weights[nodes] * (ONE_PASS / max(float(weights[nodes].sum()), 1e-300)))
    if not work.any():  # copies alone: every run counts the same
        work[:] = 1.0
    return Steps(
        *grouped(reads, count),
        *grouped(wants, count),
        last,
        first_want,
        np.flatnonzero(head).astype(np.int32),
        head,
        workload.once[nodes],
        gradient,
        np.array([graph.nodes[i].op in COSTLY for i in operators], dtype=np.bool_),
        work,
    )


class Flat(NamedTuple):
    """The training graph of a schedule as ``allocator.allocate`` reads it; see ``Tables``.

    Variables have rows, but nothing of theirs is read. ``before`` are the rows, other than
    variables, that must have run before each.
    """

    forward: int
    variable: np.ndarray
    use_start: np.ndarray
    use_entry: np.ndarray
    use_row: np.ndarray
    use_owner: np.ndarray
    output_start: np.ndarray
    elements: np.ndarray
    rank: np.ndarray
    sizes: np.ndarray
    made: np.ndarray
    inplace_start: np.ndarray
    inplace_input: np.ndarray
    inplace_entry: np.ndarray
    inplace_row: np.ndarray
    inplace_owner: np.ndarray
    inplace_output: np.ndarray
    inplace_identity: np.ndarray
    head_row: np.ndarray
    head_entry: np.ndarray
    head_owner: np.ndarray
    outputs: int
    before_start: np.ndarray
    before: np.ndarray


@compiled
def flatten(b, rows):  # type: ignore[no-untyped-def]
    """The rows of a training step for the allocator; as ``tables.build`` makes them.

    Parameters
    ----------
    b : Blueprint
    rows : rows.Rows

    Returns
    -------
    Flat
    """
    kinds = b.kinds
    count = rows.source.shape[0]
    kind = np.empty(count, dtype=np.int32)
    variable = np.empty(count, dtype=np.bool_)
    output_start = np.zeros(count + 1, dtype=np.int32)
    options = 0
    for row in range(count):
        if rows.what[row] == ITSELF:
            k = kinds.of_row[rows.source[row]]
        elif rows.what[row] == MASKED:
            k = kinds.of_masked[rows.source[row]]
        elif rows.what[row] == READER:
            k = kinds.of_reader[rows.source[row]]
        else:
            k = kinds.of_scratch[rows.source[row]]
        kind[row] = k
        variable[row] = kinds.variable[k]
        output_start[row + 1] = (
            output_start[row] + kinds.output_start[k + 1] - kinds.output_start[k]
        )
        options += kinds.option_start[k + 1] - kinds.option_start[k]
    reads = rows.read_row.shape[0]
    use_start = np.zeros(count + 1, dtype=np.int32)
    use_entry = np.empty(reads, dtype=np.int32)
    rank = np.empty(output_start[count], dtype=np.int32)
    size = np.empty(output_start[count], dtype=np.int32)
    made = np.empty(output_start[count], dtype=np.int32)
    dtype = np.empty(output_start[count], dtype=np.int32)
    inplace_start = np.zeros(count + 1, dtype=np.int32)
    inplace_input = np.empty(options, dtype=np.int32)
    inplace_entry = np.empty(options, dtype=np.int32)
    inplace_output = np.empty(options, dtype=np.int32)
    inplace_identity = np.empty(options, dtype=np.bool_)
    before_start = np.zeros(count + 1, dtype=np.int32)
    before = np.empty(reads + rows.wait_row.shape[0], dtype=np.int32)
    uses = befores = option = 0
    for row in range(count):
        k = kind[row]
        entry = output_start[row]
        shift = entry - kinds.output_start[k]
        for q in range(kinds.output_start[k], kinds.output_start[k + 1]):
            rank[q + shift] = kinds.rank[q]
            size[q + shift] = kinds.size[q]
            dtype[q + shift] = kinds.dtype[q]
            made[q + shift] = kinds.made[q] + shift
        first = rows.read_start[row]
        ignored = kinds.ignored_start[k] - first
        holds = False
        for j in range(first, rows.read_start[row + 1]):
            source = rows.read_row[j]
            holds |= not kinds.ignored[ignored + j]
            if not variable[source]:
                before[befores] = source
                befores += 1
                if not kinds.ignored[ignored + j]:
                    use_entry[uses] = output_start[source] + rows.read_output[j]
                    uses += 1
        for j in range(rows.wait_start[row], rows.wait_start[row + 1]):
            before[befores] = rows.wait_row[j]
            befores += 1
        for q in range(kinds.option_start[k], kinds.option_start[k + 1]):
            j = first + kinds.option_input[q]
            source = rows.read_row[j]
            into = output_start[source] + rows.read_output[j]
            out = entry + kinds.option_output[q]
            if variable[source] or size[into] != size[out]:
                continue
            same = kinds.option_identity[q] and dtype[into] == dtype[out]
            if same or holds:
                inplace_input[option] = kinds.option_input[q]
                inplace_entry[option] = into
                inplace_output[option] = out
                inplace_identity[option] = same
                option += 1
        use_start[row + 1] = uses
        before_start[row + 1] = befores
        inplace_start[row + 1] = option
    t = b.template
    outputs = t.head_row.shape[0]
    head_row = np.empty(outputs + b.gradient_row.shape[0], dtype=np.int32)
    head_entry = np.empty(head_row.shape[0], dtype=np.int32)
    heads = 0
    for h in range(outputs):
        head_row[heads] = rows.first[t.head_row[h]]
        head_entry[heads] = output_start[head_row[heads]] + t.head_output[h]
        heads += 1
    for h in range(b.gradient_row.shape[0]):
        row = rows.latest[b.gradient_row[h]]
        entry = output_start[row] + b.gradient_output[h]
        new = True
        for other in range(outputs):
            new &= head_entry[other] != entry
        if new:
            head_row[heads] = row
            head_entry[heads] = entry
            heads += 1
    own = np.full(max(uses, options, heads, befores) + 1, KEPT, dtype=np.int32)
    return Flat(
        count,
        variable,
        use_start,
        use_entry[:uses],
        own,
        own,
        output_start,
        rank,  # for its length
        rank,
        kinds.sizes,
        made,
        inplace_start,
        inplace_input[:option],
        inplace_entry[:option],
        own,
        own,
        inplace_output[:option],
        inplace_identity[:option],
        head_row[:heads],
        head_entry[:heads],
        own,
        heads,
        before_start,
        before[:befores],
    )


@compiled
def judge(b, events, match_ranges, limit):  # type: ignore[no-untyped-def]
    """Bytes of the pool of a schedule, 4 to an element; -1 if it is more than ``limit``.

    The gradients are part of it: they are outputs of the training symbol.

    Parameters
    ----------
    b : Blueprint
    events : np.ndarray of int32
        As ``unroll`` makes them, positions.
    match_ranges : np.ndarray
        Those that MXNet tries; it takes the best.
    limit : int
        Bytes.

    Returns
    -------
    int
        Bytes, or -1.
    int
        The place of the best match range.
    """
    nodes = np.empty(events.shape[0], dtype=np.int32)
    for k in range(events.shape[0]):
        nodes[k] = b.node[events[k]] if events[k] >= 0 else ~b.node[~events[k]]
    flat = flatten(b, rows_of(b.template, nodes))
    order, _ = walk(
        0, flat.before_start, flat.before, flat.use_owner, flat.head_row, flat.use_owner
    )
    reads = np.zeros(flat.rank.shape[0], dtype=np.int32)
    for row in order:
        for q in range(flat.use_start[row], flat.use_start[row + 1]):
            reads[flat.use_entry[q]] += 1
    for entry in flat.head_entry:
        reads[entry] += 1
    recomputed = np.zeros(1, dtype=np.bool_)
    best = -1
    place = 0
    for k in range(match_ranges.shape[0]):
        pool = allocate(flat, recomputed, order, reads, match_ranges[k], limit)[0]
        if pool <= limit:
            best = pool
            place = k
            limit = pool - 1
    return best, place
