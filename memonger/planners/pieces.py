"""Dynamic programming over trees of cuts: the least forward work within a memory.

Between n + 1 candidate boundaries of the execution order lie n(n + 1)/2 *pieces*. For each of them
is worked out what it needs if it is not divided (a leaf of the tree: what is missing runs, then the
gradients), how much memory running through it takes, and how much is alive behind it. Then, as in
Revolve but with the real sizes: a piece with a memory m is a leaf, or it is cut where running to
the cut, the right part with what is left of m, and the left part with all of m take least work.

The memory is counted in live tensors whose sizes are raised to a power, for several powers at once:
MXNet's planner hands out whole blocks, so that their number counts as well as their bytes.
"""

from typing import NamedTuple

import numpy as np

from memonger.compiled import compiled
from memonger.planners.binomial import LEAF
from memonger.planners.judge import Blueprint, grouped
from memonger.planners.unroll import ALL, COSTLY, FREE, HELD, Steps, _missing
from memonger.schedule import Workload, first_time

FLAGS = 3  # ALIVE, ALL, COSTLY: what is held of the left part
ASKED_FAR = 30  # pieces: further on, nearly all that is alive at a cut is asked for
ENOUGH = 1.25  # times the cuts that are wanted: all of them are taken
IMPOSSIBLE = np.float32(1e30)
DIVIDED = 1


class Entries(NamedTuple):
    """What the results and gradients of a network weigh, who makes and who reads them.

    Rows and entries are those of ``Tables``.

    Attributes
    ----------
    steps : Steps
    node : np.ndarray
        The forward node of each position.
    forward : int
        Rows from twice that on are gradients.
    emit_start, emit : np.ndarray
        For each position the gradient rows that run with it.
    output_start, use_start, use_entry, inplace_start, ..., inplace_identity
        As in ``Tables``.
    first : np.ndarray of bool
        For each entry whether it is read from the first time that its operator ran.
    weight : np.ndarray, (entries, powers)
        0 where the entry is part of a gradient that the user asked for: that stays to the end.
    reader : np.ndarray
        Of results of operators the last position that reads them; of gradients the first position
        whose gradient reads them (so the last to run); -1 for none.
    made : np.ndarray
        Of gradients the position with whose gradient they are made; otherwise -1.
    """

    steps: Steps
    node: np.ndarray
    forward: int
    emit_start: np.ndarray
    emit: np.ndarray
    output_start: np.ndarray
    use_start: np.ndarray
    use_entry: np.ndarray
    inplace_start: np.ndarray
    inplace_input: np.ndarray
    inplace_entry: np.ndarray
    inplace_output: np.ndarray
    inplace_identity: np.ndarray
    first: np.ndarray
    weight: np.ndarray
    reader: np.ndarray
    made: np.ndarray


class Pieces(NamedTuple):
    """What the pieces between boundaries need; [s, t] is the one from boundary s to boundary t.

    Attributes
    ----------
    bounds : np.ndarray
        Positions of the boundaries, from 0 to the number of operators.
    alive : np.ndarray, (s, t, powers)
        What was made in the piece and is alive behind it.
    highest : np.ndarray, (s, t, powers)
        The most that is alive while it is run through, nothing being held.
    work : np.ndarray, (s, t)
        Of running through.
    gradients : np.ndarray, (t, powers)
        Gradients that are alive at a boundary.
    leaf, kept : np.ndarray, (flag, s, t, powers)
        What an undivided piece needs, and what is held for it meanwhile.
    leaf_work : np.ndarray, (flag, s, t)
    spare_start, spare_at, spare : np.ndarray
        For each [c, t] what is alive at c and not asked for by that piece: positions and weights.
    """

    bounds: np.ndarray
    alive: np.ndarray
    highest: np.ndarray
    work: np.ndarray
    gradients: np.ndarray
    leaf: np.ndarray
    kept: np.ndarray
    leaf_work: np.ndarray
    spare_start: np.ndarray
    spare_at: np.ndarray
    spare: np.ndarray


def weigh(workload: Workload, b: Blueprint, powers: np.ndarray) -> Entries:
    """The entries of a network, their sizes raised to these powers."""
    training, graph = workload.training, workload.training.graph
    t, template = training.tables, b.template
    n, entries, count = t.forward, len(t.elements), len(b.node)
    emitted = [
        (p, int(row))
        for p, i in enumerate(workload.operators)
        for row in template.event_row[template.event_start[i] : template.event_start[i + 1]]
    ]
    emit_start, emit = grouped(emitted, count)
    is_first = np.zeros(entries, dtype=np.bool_)
    for i in workload.operators:
        for k in range(len(graph.tensors[i])):
            is_first[t.output_start[i] + k] = first_time(graph.nodes[i].op, k)
    sums = np.zeros(len(t.variable), dtype=np.bool_)  # rows that add gradients up
    sums[2 * n :] = (training.owners < 0) & ~t.variable[2 * n :]
    nbytes = 4.0 * t.elements
    weight = np.where(nbytes[:, None] > 0, np.maximum(nbytes, 1)[:, None] ** powers, 0.0)
    rows = len(t.variable)
    row_of = np.repeat(np.arange(rows), np.diff(t.output_start))
    when = np.full(rows, -1, dtype=np.int64)  # the position with which it runs
    when[b.node] = np.arange(count)
    when[emit] = np.repeat(np.arange(count), np.diff(emit_start))
    used = np.repeat(np.arange(rows), np.diff(t.use_start))
    runs = when[used] >= 0
    entry, by = t.use_entry[runs], used[runs]
    gradient, late = row_of >= 2 * n, row_of[entry] >= 2 * n
    reader = np.full(entries, -1, dtype=np.int64)
    np.maximum.at(reader, entry[by < n], when[by[by < n]])
    first = np.full(entries, count, dtype=np.int64)
    np.minimum.at(first, entry[late], when[by[late]])
    reader[gradient] = np.where(first == count, -1, first)[gradient]
    # What ends in a gradient that was asked for: nobody reads it, or it is added up to such a one.
    asked = gradient & (reader == -1)
    asked[t.output_start[b.gradient_row] + b.gradient_output] = True
    for row in sorted(emit[sums[emit]].tolist(), reverse=True):
        if asked[t.output_start[row]]:
            for e in t.use_entry[t.use_start[row] : t.use_start[row + 1]].tolist():
                asked[e] |= bool(sums[row_of[e]])
    weight[asked] = 0.0
    return Entries(
        b.steps,
        b.node,
        n,
        emit_start,
        emit,
        t.output_start,
        t.use_start,
        t.use_entry,
        t.inplace_start,
        t.inplace_input,
        t.inplace_entry,
        t.inplace_output,
        t.inplace_identity,
        is_first,
        weight,
        reader,
        np.where(gradient, when[row_of], -1),
    )


@compiled
def _leaf(g, lo, hi, flag, mark, held, asked, rows, refs, storage, stamp, need, state):  # type: ignore[no-untyped-def]
    """Memory of an undivided piece, by simulation; ``need`` and ``state`` get it, work returned."""
    s = g.steps
    n, count = g.forward, g.node.shape[0]
    powers = g.weight.shape[1]
    for i in range(lo, hi):
        held[i] = HELD if s.last[i] >= hi else FREE
    if flag == ALL:
        for i in range(lo, hi):
            if s.gradient[i]:
                for q in range(s.want_start[i], s.want_start[i + 1]):
                    if s.want[q] >= lo:
                        held[s.want[q]] = HELD
    elif flag == COSTLY:
        _missing(s, lo, hi, held, asked, mark)
        for i in range(lo, hi):
            if s.costly[i] and asked[i] == mark:
                held[i] = HELD
    mark += 1
    for i in range(lo, hi):
        if s.gradient[i]:
            for q in range(s.want_start[i], s.want_start[i + 1]):
                asked[s.want[q]] = mark
    for i in range(hi - 1, lo - 1, -1):
        if asked[i] == mark and held[i] == FREE:
            for q in range(s.read_start[i], s.read_start[i + 1]):
                asked[s.read[q]] = mark
    # What runs, in order; before it, what is held.
    number = 0
    for i in range(lo, hi):
        if held[i] == HELD:
            rows[number] = g.node[i]
            number += 1
    sources = number
    work = 0.0
    for i in range(lo, hi):
        if asked[i] == mark and held[i] == FREE:
            rows[number] = g.node[i]
            number += 1
            work += s.work[i]
    for i in range(hi - 1, lo - 1, -1):
        for q in range(g.emit_start[i], g.emit_start[i + 1]):
            rows[number] = g.emit[q]
            number += 1
    live = np.zeros(powers)
    for k in range(number):
        row = rows[k]
        for e in range(g.output_start[row], g.output_start[row + 1]):
            stamp[e] = mark
            refs[e] = 1 if row >= 2 * n and g.reader[e] < lo else 0
            storage[e] = -1
    for k in range(sources, number):
        row = rows[k]
        for q in range(g.use_start[row], g.use_start[row + 1]):
            e = g.use_entry[q]
            if row >= 2 * n and g.first[e]:
                continue
            if stamp[e] == mark:
                refs[e] += 1
            elif e >= g.output_start[2 * n]:  # a gradient that comes from further on
                stamp[e] = mark
                refs[e] = 2 if g.reader[e] < lo else 1
                storage[e] = e
                for p in range(powers):
                    live[p] += g.weight[e, p]
    for p in range(powers):
        state[p] = 0.0
    for k in range(sources):
        row = rows[k]
        for e in range(g.output_start[row], g.output_start[row + 1]):
            if refs[e] > 0:
                storage[e] = e
            for p in range(powers):
                if refs[e] > 0:
                    live[p] += g.weight[e, p]
                if refs[e] > 0 or (g.reader[e] >= hi and hi < count):
                    state[p] += g.weight[e, p]
    for p in range(powers):
        need[p] = live[p]
    for k in range(sources, number):
        row = rows[k]
        taken = 0
        for q in range(g.inplace_start[row], g.inplace_start[row + 1]):
            out, e = g.inplace_output[q], g.inplace_entry[q]
            if storage[out] >= 0 or refs[out] == 0 or g.weight[out, 0] == 0.0:
                continue
            if stamp[e] != mark or storage[e] < 0 or (taken >> g.inplace_input[q]) & 1:
                continue
            if row >= 2 * n and g.first[e]:
                continue
            own = storage[e]
            if refs[own] == 1 or g.inplace_identity[q]:
                taken |= 1 << g.inplace_input[q]
                storage[out] = own
                if own != out:
                    refs[own] += refs[out]
        for e in range(g.output_start[row], g.output_start[row + 1]):
            if storage[e] < 0:
                storage[e] = e
                for p in range(powers):
                    live[p] += g.weight[e, p]
        for p in range(powers):
            need[p] = max(need[p], live[p])
        for q in range(g.use_start[row], g.use_start[row + 1]):
            e = g.use_entry[q]
            if stamp[e] != mark or storage[e] < 0 or (row >= 2 * n and g.first[e]):
                continue
            own = storage[e]
            refs[own] -= 1
            if refs[own] == 0:
                for p in range(powers):
                    live[p] -= g.weight[own, p]
        for e in range(g.output_start[row], g.output_start[row + 1]):
            if refs[e] == 0 and storage[e] == e:
                for p in range(powers):
                    live[p] -= g.weight[e, p]
    return work


@compiled
def _through(g, bounds, entry):  # type: ignore[no-untyped-def]
    """For each piece the gradients that are made behind it and read before it."""
    m, powers = bounds.shape[0], g.weight.shape[1]
    passing = np.zeros((m + 1, m + 1, powers))
    for e in entry:
        if g.reader[e] < 0 or g.made[e] < 0:
            continue
        after = np.searchsorted(bounds, g.made[e], side="right") - 1  # the last t before it
        before = np.searchsorted(bounds, g.reader[e], side="right")  # the first s behind it
        for p in range(powers):
            passing[before, after, p] += g.weight[e, p]
    for s in range(1, m):
        for t in range(m):
            for p in range(powers):
                passing[s, t, p] += passing[s - 1, t, p]
    for s in range(m):
        for t in range(m - 2, -1, -1):
            for p in range(powers):
                passing[s, t, p] += passing[s, t + 1, p]
    return passing


@compiled
def measure(g, bounds, cap):  # type: ignore[no-untyped-def]
    """Work out `Pieces`.

    Parameters
    ----------
    g : Entries
    bounds : np.ndarray of int32
        Ascending; they need not begin or end where the network does.
    cap : np.ndarray, powers
        Pieces that need more than that undivided, for every power, need not be known.
    """
    s_ = g.steps
    n, count = g.forward, g.node.shape[0]
    m, powers = bounds.shape[0], g.weight.shape[1]
    alive = np.zeros((m, m, powers))
    highest = np.zeros((m, m, powers))
    work = np.zeros((m, m))
    leaf = np.full((FLAGS, m, m, powers), np.inf)
    kept_ = np.zeros((FLAGS, m, m, powers))
    leaf_work = np.zeros((FLAGS, m, m))
    passing = _through(g, bounds, np.arange(g.output_start[2 * n], g.reader.shape[0]))
    gradients = np.zeros((m, powers))
    for k in range(m):
        gradients[k] = passing[k, k]
    # Running through.
    ending_start = np.zeros(count + 2, dtype=np.int64)
    for i in range(count):
        row = g.node[i]
        for e in range(g.output_start[row], g.output_start[row + 1]):
            if g.reader[e] >= 0:
                ending_start[g.reader[e] + 2] += 1
    ending_start = np.cumsum(ending_start)
    ending = np.empty(ending_start[-1], dtype=np.int64)
    maker = np.empty(ending_start[-1], dtype=np.int64)
    for i in range(count):
        row = g.node[i]
        for e in range(g.output_start[row], g.output_start[row + 1]):
            if g.reader[e] >= 0:
                ending[ending_start[g.reader[e] + 1]] = e
                maker[ending_start[g.reader[e] + 1]] = i
                ending_start[g.reader[e] + 1] += 1
    live, most = np.zeros(powers), np.zeros(powers)
    for s in range(m - 1):
        live[:] = 0.0
        most[:] = 0.0
        done = 0.0
        to = s + 1
        for i in range(bounds[s], bounds[-1]):
            row = g.node[i]
            in_place = g.inplace_start[row + 1] > g.inplace_start[row]
            for p in range(powers):
                total = going = freed = 0.0
                for e in range(g.output_start[row], g.output_start[row + 1]):
                    total += g.weight[e, p]
                    if g.reader[e] > i:
                        going += g.weight[e, p]
                for q in range(ending_start[i], ending_start[i + 1]):
                    if maker[q] >= bounds[s]:
                        freed += g.weight[ending[q], p]
                more = 0.0 if in_place and freed >= total else total
                most[p] = max(most[p], live[p] + more)
                live[p] += going - freed
            done += s_.work[i]
            if i + 1 == bounds[to]:
                alive[s, to] = live
                highest[s, to] = most
                work[s, to] = done
                to += 1
    # Undivided.
    entries = g.reader.shape[0]
    held = np.zeros(count, dtype=np.int8)
    asked = np.zeros(count, dtype=np.int32)
    rows = np.empty(2 * count + g.emit.shape[0], dtype=np.int32)
    refs = np.zeros(entries, dtype=np.int32)
    storage = np.zeros(entries, dtype=np.int32)
    stamp = np.zeros(entries, dtype=np.int32)
    mark = 0
    for s in range(m - 1):
        for flag in range(FLAGS):
            for to in range(s + 1, m):
                if flag and bounds[to] == count:
                    break
                mark += 2
                leaf_work[flag, s, to] = _leaf(
 g, bounds[s], bounds[to], flag, mark, held, asked, rows, refs,
                    storage, stamp, leaf[flag, s, to], kept_[flag, s, to],
                )  # fmt: skip
                enough = True
                for p in range(powers):
                    leaf[flag, s, to, p] += passing[s, to, p]
                    enough &= leaf[flag, s, to, p] > cap[p]
                if enough:
                    break
    # What is alive at c, not asked for by [c, t], and not by gradients before c.
    spare_start = np.zeros(m * m + 1, dtype=np.int64)
    spare_at = np.empty(16, dtype=np.int32)
    spare = np.empty((16, powers))
    found = 0
    reading = np.zeros(count, dtype=np.int32)  # the first gradient that reads it
    reading[:] = count
    for i in range(count - 1, -1, -1):
        if s_.gradient[i]:
            for q in range(s_.want_start[i], s_.want_start[i + 1]):
                reading[s_.want[q]] = i
    for c in range(m):
        for to in range(m):
            if 0 < c < to and bounds[to] < count and to - c <= ASKED_FAR:
                mark += 1
                for i in range(bounds[c], bounds[to]):
                    held[i] = HELD if s_.last[i] >= bounds[to] or s_.head[i] else FREE
                _missing(s_, bounds[c], bounds[to], held, asked, mark)
                for i in range(bounds[c]):
                    if bounds[c] <= s_.last[i] < bounds[to] and asked[i] != mark:
                        if reading[i] < bounds[c]:
                            continue
                        if found == len(spare_at):
                            spare_at = np.concatenate((spare_at, spare_at))
                            spare = np.concatenate((spare, spare))
                        spare_at[found] = i
                        spare[found] = 0.0
                        row = g.node[i]
                        for e in range(g.output_start[row], g.output_start[row + 1]):
                            if g.reader[e] >= bounds[c]:
                                for p in range(powers):
                                    spare[found, p] += g.weight[e, p]
                        found += 1
            spare_start[c * m + to + 1] = found
    return (
        alive, highest, work, gradients, leaf, kept_, leaf_work,
        spare_start, spare_at[:found], spare[:found],
    )  # fmt: skip


@compiled
def _held_at(x, s, c, t, p):  # type: ignore[no-untyped-def]
    """What of [s, c] is held while [c, t] is processed, if nothing is kept for the left part."""
    amount = x.alive[s, c, p]
    m = x.bounds.shape[0]
    spared = amount
    for q in range(x.spare_start[c * m + t], x.spare_start[c * m + t + 1]):
        if x.spare_at[q] >= x.bounds[s]:
            spared -= x.spare[q, p]
    return 0.0 if spared <= amount * 1e-6 else spared


@compiled
def least_work(x, power, most, slots, inner):  # type: ignore[no-untyped-def]
    """The least work of each piece within each memory up to ``most``, in ``slots`` equal steps.

    Parameters
    ----------
    x : Pieces
    power : int
        Which of the powers.
    most : float
    slots : int
    inner : np.ndarray, (s, slots + 1)
        The least work of the pieces between neighbouring boundaries if they are divided further;
        `IMPOSSIBLE` where they cannot be.

    Returns
    -------
    np.ndarray, (s, t, slots + 1)
        Work; `IMPOSSIBLE` where there is no way.
    np.ndarray, (s, t, slots + 1)
        0: undivided; 1: divided further; 4 c + flag: cut at boundary c.
    """
    m = x.bounds.shape[0]
    unit = most / slots
    best = np.full((m, m, slots + 1), IMPOSSIBLE, dtype=np.float32)
    choice = np.zeros((m, m, slots + 1), dtype=np.uint16)
    far = slots + 1
    for length in range(1, m):
        for s in range(m - length):
            t = s + length
            for k in range(_slot(x.leaf[0, s, t, power], unit, far), slots + 1):
                best[s, t, k] = x.leaf_work[0, s, t]
            if length == 1:
                for k in range(slots + 1):
                    if inner[s, k] < best[s, t, k]:
                        best[s, t, k] = inner[s, k]
                        choice[s, t, k] = DIVIDED
            behind = x.gradients[t, power] + x.alive[s, t, power]
            for c in range(s + 1, t):
                held = _held_at(x, s, c, t, power)
                nothing = held == 0.0 and x.alive[s, c, power] > 0.0
                run = np.float32(0.0 if nothing else x.work[s, c])
                through = behind if nothing else behind + x.highest[s, c, power]
                through = _slot(through, unit, far)
                shift = _slot(held, unit, far)
                for k in range(max(through, shift), slots + 1):
                    total = run + best[c, t, k - shift] + best[s, c, k]
                    if total < best[s, t, k]:
                        best[s, t, k] = total
                        choice[s, t, k] = 4 * c
                if nothing:
                    continue
                for flag in range(1, FLAGS):
                    shift = _slot(max(x.kept[flag, s, c, power], held), unit, far)
                    least = max(shift, through, _slot(x.leaf[flag, s, c, power], unit, far))
                    run = np.float32(x.work[s, c] + x.leaf_work[flag, s, c])
                    for k in range(least, slots + 1):
                        total = run + best[c, t, k - shift]
                        if total < best[s, t, k]:
                            best[s, t, k] = total
                            choice[s, t, k] = 4 * c + flag
    return best, choice


@compiled
def _slot(amount, unit, far):  # type: ignore[no-untyped-def]
    value = np.ceil(amount / unit - 1e-9)
    return far if value >= far else int(value)


@compiled
def tree_of(x, choice, power, most, slot):  # type: ignore[no-untyped-def]
    """The tree that ``least_work`` found for a memory.

    Returns
    -------
    np.ndarray of int32, (nodes, 2)
        Cuts (positions) and flags in preorder. A leaf that is divided further, the one from
        boundary s, stands as (-2 - s, its slot).
    """
    m = x.bounds.shape[0]
    slots = choice.shape[2] - 1
    unit = most / slots
    tree = np.empty((4 * m, 2), dtype=np.int32)
    todo = np.empty((2 * m, 3), dtype=np.int64)
    todo[0, 0], todo[0, 1], todo[0, 2] = 0, m - 1, slot
    depth, count = 1, 0
    while depth:
        depth -= 1
        s, t, k = todo[depth, 0], todo[depth, 1], todo[depth, 2]
        chosen = -1 if s < 0 else int(choice[s, t, k])
        if chosen <= DIVIDED:
            tree[count, 0], tree[count, 1] = LEAF, 0
            if chosen == DIVIDED:
                tree[count, 0], tree[count, 1] = LEAF - 1 - s, k
            count += 1
            continue
        c, flag = chosen // 4, chosen % 4
        held = _held_at(x, s, c, t, power)
        if flag:
            held = max(held, x.kept[flag, s, c, power])
        tree[count, 0], tree[count, 1] = x.bounds[c], flag
        count += 1
        todo[depth, 0], todo[depth, 1] = c, t
        todo[depth, 2] = k - _slot(held, unit, slots + 1)
        depth += 1
        todo[depth, 0], todo[depth, 1], todo[depth, 2] = -1 if flag else s, c, k
        depth += 1
    return tree[:count]


def alive_at(g: Entries) -> np.ndarray:
    """What is alive before each position, weighed with the first power; one more at the end."""
    count = len(g.node)
    change = np.zeros(count + 2)
    for i, row in enumerate(g.node.tolist()):
        entries = slice(g.output_start[row], g.output_start[row + 1])
        for last, weight in zip(g.reader[entries].tolist(), g.weight[entries, 0].tolist()):
            if last > i:
                change[i + 1] += weight
                change[last + 1] -= weight
    return np.cumsum(change)[:-1]


def boundaries(alive: np.ndarray, lo: int, hi: int, most: int) -> np.ndarray:
    """At most so many boundaries between two positions, and these: where little is alive.

    All of them if they are few; otherwise local minima, of these the deepest (the local minima
    among them) as long as there are enough, or if there are few others as well; the least of each
    of as many equal stretches.
    """
    inside = np.arange(lo + 1, hi)
    if len(inside) > most:
        low = _minima(alive, inside)
        deeper = _minima(alive, low)
        while most <= len(deeper) < len(low):
            low, deeper = deeper, _minima(alive, deeper)
        if len(low) > ENOUGH * most:
            low = _least_of_stretches(alive, low, most)
        rest = np.setdiff1d(inside, low)
        inside = np.union1d(low, _least_of_stretches(alive, rest, max(0, most - len(low))))
    return np.concatenate([[lo], inside, [hi]]).astype(np.int32)


def _minima(alive: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Of some positions those at which less is alive than at their neighbours among them."""
    here = np.concatenate([[np.inf], alive[where], [np.inf]])
    return where[(here[1:-1] <= here[:-2]) & (here[1:-1] < here[2:])]


def _least_of_stretches(alive: np.ndarray, where: np.ndarray, most: int) -> np.ndarray:
    if len(where) <= most:
        return where
    stretches = np.array_split(where, most) if most else []
    return np.array([part[np.argmin(alive[part])] for part in stretches], dtype=np.int64)
