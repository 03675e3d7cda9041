"""What a schedule costs: its training graph, order and memory, in compiled code.

The same graph that ``schedule`` writes out for MXNet, without names and attributes: every run of
an operator, every gradient, the sums of gradients, and who waits for whom. It is ordered and
planned by the replay of MXNet's planner (``tables``, ``allocator``).
"""

from typing import NamedTuple, Sequence, Tuple

import numpy as np

from memonger.allocator import NO_LIMIT, allocate
from memonger.compiled import compiled
from memonger.flops import forward_flops
from memonger.planners.unroll import Steps
from memonger.schedule import Workload, first_time
from memonger.tables import KEPT, Tables, _walk

#: Operators whose results are worth keeping where others are computed again.
COSTLY = frozenset(
    "Convolution Deconvolution FullyConnected dot batch_dot RNN Correlation _linalg_gemm "
    "_linalg_gemm2 _contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution "
    "_contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt "
    "_contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt".split()
)
SMALLEST = 4  # bytes of what reads a result that nobody else does


class Blueprint(NamedTuple):
    """A network, ready to be scheduled in compiled code. Rows and entries are those of ``Tables``.

    Attributes
    ----------
    steps : Steps
    tables : Tables
    node : np.ndarray
        The forward node of each position.
    position : np.ndarray
        The position of each forward node, -1 where it never runs.
    masked : np.ndarray of bool
        For each forward node whether it runs again as a product with its mask (Dropout).
    first : np.ndarray of bool
        For each entry whether it is read from the first time that its operator ran.
    emit_start, emit : np.ndarray
        For each position the rows that come with its gradient, and then those that come last.
    early : np.ndarray of bool
        For each gradient row (from 2n on) whether it adds up a sum of many terms, which what comes
        next has to wait for.
    wait_start, wait : np.ndarray
        For each gradient row what must have run before it.
    rank : np.ndarray
        Of each entry the place of its size in ``sizes``.
    sizes : np.ndarray
        Bytes, ascending.
    """

    steps: Steps
    tables: Tables
    node: np.ndarray
    position: np.ndarray
    masked: np.ndarray
    first: np.ndarray
    emit_start: np.ndarray
    emit: np.ndarray
    early: np.ndarray
    wait_start: np.ndarray
    wait: np.ndarray
    rank: np.ndarray
    sizes: np.ndarray


def blueprint(workload: Workload) -> Blueprint:
    """Make the arrays for a network."""
    training, graph = workload.training, workload.training.graph
    t = training.tables
    n, rows = t.forward, len(t.variable)
    node = np.array(workload.operators, dtype=np.int32)
    position = np.full(n, -1, dtype=np.int32)
    position[node] = np.arange(len(node))
    runs = np.zeros(rows, dtype=np.bool_)
    runs[t.walk_row[t.walk_row >= 2 * n]] = True
    emit_start, emit = _emitted(workload, runs, position)
    early = np.array([op == "_grad_add" for op in training.ops[2 * n :]], dtype=np.bool_)
    waits = [
        (row - 2 * n, before)
        for row, before in training.waits
        if before < n or not early[before - 2 * n]
    ]
    first = np.zeros(len(t.elements), dtype=np.bool_)
    for i in node.tolist():
        for k in range(len(graph.tensors[i])):
            first[t.output_start[i] + k] = first_time(graph.nodes[i].op, k)
    sizes = np.unique(np.append(t.sizes, SMALLEST))
    wait_start, wait = _grouped([(row, before) for row, before in waits], rows - 2 * n)
    return Blueprint(
        _steps(workload, position),
        t,
        node,
        position,
        np.array([item.op == "Dropout" for item in graph.nodes], dtype=np.bool_),
        first,
        emit_start,
        emit,
        early,
        wait_start,
        wait,
        np.searchsorted(sizes, t.sizes)[t.rank].astype(np.int32),
        sizes,
    )


def _grouped(pairs: Sequence[Tuple[int, int]], groups: int) -> Tuple[np.ndarray, np.ndarray]:
    """(group, value) pairs by group: where each group starts, and the values, in their order."""
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    start = np.concatenate([[0], np.cumsum(np.bincount(array[:, 0], minlength=groups))])
    order = np.argsort(array[:, 0], kind="stable")
    return start.astype(np.int32), array[order, 1].astype(np.int32)


def _steps(workload: Workload, position: np.ndarray) -> Steps:
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
    head = np.zeros(count, dtype=np.bool_)
    head[[position[workload.training.same[a]] for a, _ in graph.heads]] = True
    nodes = list(operators)
    return Steps(
        *_grouped(reads, count),
        *_grouped(wants, count),
        last,
        head,
        workload.once[nodes],
        gradient,
        np.array([graph.nodes[i].op in COSTLY for i in operators], dtype=np.bool_),
        forward_flops(graph)[nodes].astype(np.float64),
    )


def _emitted(
    workload: Workload, runs: np.ndarray, position: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """With the gradient of which position each row comes: as late as it may, but early sums."""
    training, t = workload.training, workload.training.tables
    n, rows, count = t.forward, len(t.variable), len(workload.operators)
    owners = training.owners.tolist()
    sources = [
        [b for b in t.read_row[t.read_start[r] : t.read_start[r + 1]].tolist() if b >= 2 * n]
        for r in range(2 * n, rows)
    ]
    # Times: 0 for the gradient of the last position, count for after that of the first.
    soonest = np.zeros(rows, dtype=np.int64)
    for row, (owner, before) in enumerate(zip(owners, sources), 2 * n):
        if owner >= 0:
            soonest[row] = count - 1 - position[owner]
        elif before:
            soonest[row] = max(soonest[b] for b in before)
    when = np.full(rows, count, dtype=np.int64)
    for row in range(rows - 1, 2 * n - 1, -1):  # what reads it has been seen
        if runs[row]:
            if owners[row - 2 * n] >= 0 or training.ops[row] == "_grad_add":
                when[row] = soonest[row]
            for before in sources[row - 2 * n]:
                when[before] = min(when[before], when[row])
    pairs = [
        (count if when[r] == count else count - 1 - when[r], r)
        for r in range(2 * n, rows)
        if runs[r] and not t.variable[r]
    ]
    return _grouped(pairs, count + 1)


class Rows(NamedTuple):
    """The training graph of a schedule as ``allocator.allocate`` reads it; see ``Tables``.

    Rows are numbered in the order in which the schedule has them; variables have none. ``before``
    are the rows that must have run before each.
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
    base: np.ndarray  # the row of ``Tables``, -1 for a reader of what nobody reads


@compiled
def _counts(b, events):  # type: ignore[no-untyped-def]
    """How many rows, reads, in-place options, entries and waits a schedule has, at most."""
    t = b.tables
    n = t.forward
    rows = reads = options = entries = waits = 0
    last = b.node.shape[0]
    for e in range(events.shape[0] + 1):
        event = events[e] if e < events.shape[0] else -1 - last
        if event >= 0:
            base = b.node[event]
            rows += 2  # it and a reader of it
            reads += max(2, t.read_start[base + 1] - t.read_start[base]) + 1
            options += max(2, t.inplace_start[base + 1] - t.inplace_start[base])
            entries += t.output_start[base + 1] - t.output_start[base] + 1
            waits += 2
        else:
            for q in range(b.emit_start[-1 - event], b.emit_start[-event]):
                base = b.emit[q]
                rows += 1
                reads += t.read_start[base + 1] - t.read_start[base]
                options += t.inplace_start[base + 1] - t.inplace_start[base]
                entries += t.output_start[base + 1] - t.output_start[base]
                waits += b.wait_start[base - 2 * n + 1] - b.wait_start[base - 2 * n] + 2
    return rows, reads, options, entries, waits


@compiled
def lay_out(b, events):  # type: ignore[no-untyped-def]
    """The training graph of a schedule.

    Parameters
    ----------
    b : Blueprint
    events : np.ndarray of int32
        As ``unroll`` makes them.

    Returns
    -------
    Rows
    """
    t, n = b.tables, b.tables.forward
    most_rows, most_reads, most_options, most_entries, most_waits = _counts(b, events)
    base_of = np.full(most_rows, -1, dtype=np.int32)
    use_start = np.zeros(most_rows + 1, dtype=np.int32)
    use_entry = np.empty(most_reads, dtype=np.int32)
    output_start = np.zeros(most_rows + 1, dtype=np.int32)
    rank = np.empty(most_entries, dtype=np.int32)
    made = np.empty(most_entries, dtype=np.int32)
    inplace_start = np.zeros(most_rows + 1, dtype=np.int32)
    inplace_input = np.empty(most_options, dtype=np.int32)
    inplace_entry = np.empty(most_options, dtype=np.int32)
    inplace_output = np.empty(most_options, dtype=np.int32)
    inplace_identity = np.zeros(most_options, dtype=np.bool_)
    before_start = np.zeros(most_rows + 1, dtype=np.int32)
    before = np.empty(most_reads + most_waits, dtype=np.int32)
    slot = np.full(most_rows, -1, dtype=np.int32)  # a place in `before` that is still free
    read = np.zeros(most_rows, dtype=np.bool_)  # whether the first output is
    latest = np.full(n, -1, dtype=np.int32)
    first = np.full(n, -1, dtype=np.int32)
    of_gradient = np.full(t.variable.shape[0] - 2 * n, -1, dtype=np.int32)
    pending = np.empty(most_rows, dtype=np.int32)
    waiting = 0
    rows = uses = options = befores = 0
    previous = -1
    last = b.node.shape[0]
    for e in range(events.shape[0] + 1):
        event = events[e] if e < events.shape[0] else -1 - last
        forward = event >= 0
        if forward:
            start, stop = b.node[event], b.node[event] + 1
        else:
            start, stop = b.emit_start[-1 - event], b.emit_start[-event]
        for k in range(start, stop):
            base = k if forward else b.emit[k]
            row = rows
            rows += 1
            base_of[row] = base
            outputs = t.output_start[base + 1] - t.output_start[base]
            entry = output_start[row]
            again = forward and first[base] >= 0 and b.masked[base]
            if again:  # a product with the mask of the first time
                outputs = 1
            for j in range(t.read_start[base], t.read_start[base + 1]):
                source = t.read_row[j]
                if t.variable[source]:
                    continue
                at = t.output_start[source] + t.read_output[j]
                if source >= 2 * n:
                    origin = of_gradient[source - 2 * n]
                else:
                    origin = first[source] if b.first[at] else latest[source]
                before[befores] = origin
                befores += 1
                if t.read_output[j] == 0:
                    read[origin] = True
                if not t.read_ignored[j]:
                    use_entry[uses] = output_start[origin] + t.read_output[j]
                    uses += 1
            if again:
                before[befores] = first[base]
                befores += 1
                use_entry[uses] = output_start[first[base]] + 1
                uses += 1
                for j in range(uses - use_start[row]):
                    inplace_input[options] = j
                    inplace_entry[options] = use_entry[use_start[row] + j]
                    inplace_output[options] = entry
                    options += 1
            else:
                for j in range(t.inplace_start[base], t.inplace_start[base + 1]):
                    source = t.inplace_row[j]
                    at = t.inplace_entry[j]
                    if source >= 2 * n:
                        origin = of_gradient[source - 2 * n]
                    else:
                        origin = first[source] if b.first[at] else latest[source]
                    inplace_input[options] = t.inplace_input[j]
                    inplace_entry[options] = output_start[origin] + at - t.output_start[source]
                    inplace_output[options] = entry + t.inplace_output[j] - t.output_start[base]
                    inplace_identity[options] = t.inplace_identity[j]
                    options += 1
            k_made = entry
            for j in range(t.output_start[base], t.output_start[base + 1]):
                if t.made[j] - t.output_start[base] < outputs:
                    made[k_made] = entry + t.made[j] - t.output_start[base]
                    k_made += 1
            for j in range(outputs):
                rank[entry + j] = b.rank[t.output_start[base] + j]
            waits = forward
            if forward:
                if previous >= 0:
                    before[befores] = previous
                    befores += 1
            else:
                for j in range(b.wait_start[base - 2 * n], b.wait_start[base - 2 * n + 1]):
                    other = b.wait[j]
                    waits = True
                    if other < n:
                        before[befores] = first[other] if b.masked[other] else latest[other]
                    else:
                        before[befores] = of_gradient[other - 2 * n]
                    befores += 1
            if waits:
                for j in range(waiting):
                    before[befores] = pending[j]
                    befores += 1
                waiting = 0
                slot[row] = befores
                before[befores] = row  # nothing, as it stands
                befores += 1
                previous = row
            if forward:
                latest[base] = row
                if first[base] < 0:
                    first[base] = row
            else:
                of_gradient[base - 2 * n] = row
                if b.early[base - 2 * n]:
                    pending[waiting] = row
                    waiting += 1
            use_start[row + 1] = uses
            inplace_start[row + 1] = options
            output_start[row + 1] = entry + outputs
            before_start[row + 1] = befores
    heads = t.head_row.shape[0]
    head_row = np.empty(heads, dtype=np.int32)
    head_entry = np.empty(heads, dtype=np.int32)
    for h in range(heads):
        source = t.head_row[h]
        if source >= 2 * n:
            head_row[h] = of_gradient[source - 2 * n]
        else:
            head_row[h] = first[source]
        output = t.head_entry[h] - t.output_start[source]
        head_entry[h] = output_start[head_row[h]] + output
        if output == 0:
            read[head_row[h]] = True
    scheduled = rows
    for row in range(scheduled):  # what nobody reads is not computed: give it a reader
        if slot[row] < 0:
            continue
        for j in range(before_start[row], before_start[row + 1]):
            other = before[j]
            if 0 <= base_of[other] < n and not read[other]:
                read[other] = True
                before[befores] = other
                befores += 1
                use_entry[uses] = output_start[other]
                uses += 1
                before[slot[row]] = rows
                entry = output_start[rows]
                rank[entry] = np.searchsorted(b.sizes, SMALLEST)
                made[entry] = entry
                rows += 1
                use_start[rows] = uses
                inplace_start[rows] = options
                output_start[rows] = entry + 1
                before_start[rows] = befores
    none = np.full(max(uses, options, heads, before_start[rows]) + 1, KEPT, dtype=np.int32)
    return Rows(
        rows,
        np.zeros(rows, dtype=np.bool_),
        use_start[: rows + 1],
        use_entry[:uses],
        none,
        none,
        output_start[: rows + 1],
        rank[: output_start[rows]],  # for its length
        rank[: output_start[rows]],
        b.sizes,
        made[: output_start[rows]],
        inplace_start[: rows + 1],
        inplace_input[:options],
        inplace_entry[:options],
        none,
        none,
        inplace_output[:options],
        inplace_identity[:options],
        head_row,
        head_entry,
        none,
        heads,
        before_start[: rows + 1],
        before[: before_start[rows]],
        base_of[:rows],
    )


@compiled
def order_of(rows):  # type: ignore[no-untyped-def]
    """The order in which MXNet runs the rows, and how often each entry is read."""
    order, _ = _walk(0, rows.before_start, rows.before, rows.use_owner, rows.head_row, rows.head_owner)
    reads = np.zeros(rows.rank.shape[0], dtype=np.int32)
    for row in order:
        for q in range(rows.use_start[row], rows.use_start[row + 1]):
            reads[rows.use_entry[q]] += 1
    for entry in rows.head_entry:
        reads[entry] += 1
    return order, reads


@compiled
def judge(b, events, match_ranges, limit):  # type: ignore[no-untyped-def]
    """Bytes of the pool of a schedule, 4 to an element; -1 if it is more than ``limit``.

    The gradients are part of it: they are outputs of the training symbol.
    """
    rows = lay_out(b, events)
    order, reads = order_of(rows)
    recomputed = np.zeros(1, dtype=np.bool_)
    best = -1
    for match_range in match_ranges:
        pool = allocate(rows, recomputed, order, reads, match_range, limit)[0]
        if pool <= limit:
            best = pool
            limit = pool - 1
    return best
