"""The order in which MXNet runs a graph: depth first from its outputs (``nnvm::DFSVisit``)."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from memonger.support.compiled import compiled


def starts(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return where each of some lists of these lengths starts in all of them, and the end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@compiled
def gathered(start, which):  # type: ignore[no-untyped-def]
    """Return the places of what some rows own, row after row, and of which row each is."""
    length = start[which + 1] - start[which]
    row = np.repeat(np.arange(which.shape[0]), length)
    return np.arange(row.shape[0]) + (start[which] + length - np.cumsum(length))[row], row


@compiled
def starts_of(key, keys):  # type: ignore[no-untyped-def]
    """Return where the items of each key start, and the end, if they stand by their keys."""
    start = np.zeros(keys + 1, dtype=np.int32)
    start[1:] = np.cumsum(np.bincount(key, minlength=keys))
    return start


@compiled
def by_key(key, keys):  # type: ignore[no-untyped-def]
    """Order items by key: return where those of each key start, and which they are."""
    start = starts_of(key, keys)
    at = start.copy()
    items = np.empty(key.shape[0], dtype=np.int32)
    for i in range(key.shape[0]):
        items[at[key[i]]] = i
        at[key[i]] += 1
    return start, items


@compiled
def walk(known, start, before, owner, heads, head_owner):  # type: ignore[no-untyped-def]
    """Order rows depth first from the heads, each after what it reads.

    The rows below ``known`` have run already: they are put down whenever they are met, with the
    owner of the read.
    """
    rows = start.shape[0] - 1
    seen = np.zeros(rows, dtype=np.bool_)
    stack = np.empty(rows, dtype=np.int32)
    at = np.empty(rows, dtype=np.int32)
    met = np.empty(rows + before.shape[0] + heads.shape[0], dtype=np.int32)
    by = np.full(met.shape[0], -1, dtype=np.int32)  # KEPT
    count, depth = 0, -1
    for h in range(heads.shape[0]):
        row, reader = heads[h], head_owner[h]
        while True:
            if row < known:
                met[count] = row
                by[count] = reader
                count += 1
            elif not seen[row]:
                seen[row] = True
                depth += 1
                stack[depth] = row
                at[depth] = start[row]
            while depth >= 0 and at[depth] == start[stack[depth] + 1]:
                met[count] = stack[depth]
                count += 1
                depth -= 1
            if depth < 0:
                break
            row, reader = before[at[depth]], owner[at[depth]]
            at[depth] += 1
    return met[:count], by[:count]
