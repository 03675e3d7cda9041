"""What the pieces between the boundaries of a network need, as memory and work.

Between n + 1 candidate boundaries of the execution order lie n(n + 1)/2 *pieces*. For each of them
is worked out what it needs if it is not divided (a leaf of the tree: what is missing runs, then the
gradients), how much memory running through it takes, and how much is alive behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.planners.trees.entries import Entries
from memonger.planners.trees.unroll import ALL, COSTLY, FREE, HELD, missing, wanted
from memonger.support.compiled import compiled

FLAGS = 3  # ALIVE, ALL, COSTLY: what is held of the left part
ASKED_FAR = 30  # pieces: further on, nearly all that is alive at a cut is asked for


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


def measure(g: Entries, bounds: np.ndarray, cap: np.ndarray) -> Pieces:
    """Work out what the pieces between these boundaries need.

    Parameters
    ----------
    g : Entries
    bounds : np.ndarray of int32
        Ascending; they need not begin or end where the network does.
    cap : np.ndarray, powers
        Pieces that need more than that undivided, for every power, need not be known.
    """
    passing = _passing(g, bounds)
    alive, highest, work = _through(g, bounds)
    leaf, kept, leaf_work = _undivided(g, bounds, passing, cap)
    gradients = np.ascontiguousarray(np.diagonal(passing).T)
    spared = _spare(g, bounds)
    return Pieces(bounds, alive, highest, work, gradients, leaf, kept, leaf_work, *spared)


def _passing(g: Entries, bounds: np.ndarray) -> np.ndarray:
    """For each piece the gradients that are made behind it and read before it."""
    m, powers = len(bounds), g.weight.shape[1]
    entries = np.flatnonzero((g.made >= 0) & (g.reader >= 0))
    after = np.searchsorted(bounds, g.made[entries], side="right") - 1  # the last t before it
    before = np.searchsorted(bounds, g.reader[entries], side="right")  # the first s behind it
    passing = np.zeros((m + 1, m + 1, powers))
    np.add.at(passing, (before, after), g.weight[entries])
    passing = np.cumsum(passing[:m, :m], axis=0)
    return np.ascontiguousarray(np.cumsum(passing[:, ::-1], axis=1)[:, ::-1])


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
        missing(s, lo, hi, held, asked, mark)
        for i in range(lo, hi):
            if s.costly[i] and asked[i] >= mark:
                held[i] = HELD
    mark += count + 1
    wanted(s, lo, hi, held, asked, mark)
    # What runs, in order; before it, what is held.
    number = 0
    for i in range(lo, hi):
        if held[i] == HELD:
            rows[number] = g.node[i]
            number += 1
    sources = number
    work = 0.0
    for i in range(lo, hi):
        if asked[i] >= mark and held[i] == FREE:
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
def _through(g, bounds):  # type: ignore[no-untyped-def]
    """What is alive behind each piece, the most that is while it is run through, and the work."""
    count, m, powers = g.node.shape[0], bounds.shape[0], g.weight.shape[1]
    alive = np.zeros((m, m, powers))
    highest = np.zeros((m, m, powers))
    work = np.zeros((m, m))
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
            done += g.steps.work[i]
            if i + 1 == bounds[to]:
                alive[s, to] = live
                highest[s, to] = most
                work[s, to] = done
                to += 1
    return alive, highest, work


@compiled
def _undivided(g, bounds, passing, cap):  # type: ignore[no-untyped-def]
    """What undivided pieces need, what is held for them meanwhile, and their work."""
    count, m, powers = g.node.shape[0], bounds.shape[0], g.weight.shape[1]
    leaf = np.full((FLAGS, m, m, powers), np.inf)
    kept = np.zeros((FLAGS, m, m, powers))
    leaf_work = np.zeros((FLAGS, m, m))
    entries = g.reader.shape[0]
    held = np.zeros(count, dtype=np.int8)
    asked = np.zeros(count, dtype=np.int64)
    rows = np.empty(2 * count + g.emit.shape[0], dtype=np.int32)
    refs = np.zeros(entries, dtype=np.int32)
    storage = np.zeros(entries, dtype=np.int32)
    stamp = np.zeros(entries, dtype=np.int64)
    mark = 0
    for s in range(m - 1):
        for flag in range(FLAGS):
            for to in range(s + 1, m):
                if flag and bounds[to] == count:
                    break
                mark += 2 * (count + 1)
                need, state = leaf[flag, s, to], kept[flag, s, to]
                leaf_work[flag, s, to] = _leaf(
                    g, bounds[s], bounds[to], flag, mark, held, asked, rows, refs, storage, stamp,
                    need, state,
                )  # fmt: skip
                enough = True
                for p in range(powers):
                    leaf[flag, s, to, p] += passing[s, to, p]
                    enough &= leaf[flag, s, to, p] > cap[p]
                if enough:
                    break
    return leaf, kept, leaf_work


@compiled
def _spare(g, bounds):  # type: ignore[no-untyped-def]
    """What is alive at c, not asked for by [c, t], and not by gradients before c."""
    s = g.steps
    count, m, powers = g.node.shape[0], bounds.shape[0], g.weight.shape[1]
    held = np.zeros(count, dtype=np.int8)
    asked = np.zeros(count, dtype=np.int64)
    mark = 0
    spare_start = np.zeros(m * m + 1, dtype=np.int64)
    spare_at = np.empty(16, dtype=np.int32)
    spare = np.empty((16, powers))
    found = 0
    reading = np.full(count, count, dtype=np.int32)  # the first gradient that reads it
    for i in range(count - 1, -1, -1):
        if s.gradient[i]:
            for q in range(s.want_start[i], s.want_start[i + 1]):
                reading[s.want[q]] = i
    for c in range(m):
        for to in range(m):
            if 0 < c < to and bounds[to] < count and to - c <= ASKED_FAR:
                mark += count + 1
                for i in range(bounds[c], bounds[to]):
                    held[i] = HELD if s.last[i] >= bounds[to] or s.head[i] else FREE
                missing(s, bounds[c], bounds[to], held, asked, mark)
                for i in range(bounds[c]):
                    if bounds[c] <= s.last[i] < bounds[to] and asked[i] < mark:
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
    return spare_start, spare_at[:found], spare[:found]
