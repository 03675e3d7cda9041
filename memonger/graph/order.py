"""The order in which MXNet runs a graph: depth first from its outputs (``nnvm::DFSVisit``)."""

from __future__ import annotations

from typing import Sequence, Tuple

import numpy as np

from memonger.support.compiled import compiled

#: Where the links of each row start, the rows before it, and the owners of the reads.
Links = Tuple[np.ndarray, np.ndarray, np.ndarray]


def depth_first(
    reads: Sequence[Sequence[int]], waits: Sequence[tuple[int, int, int]], heads: Sequence[int]
) -> list[int]:
    """Return the rows in the order in which they run.

    ``reads`` are the rows that each reads, ``waits`` as for `links`, ``heads`` the outputs' rows.
    """
    read = [(row, source, -1) for row, sources in enumerate(reads) for source in sources]
    head = np.array(heads, dtype=np.int64)
    return walk(0, *links(len(reads), read, waits), head, head)[0].tolist()


def links(
    rows: int, reads: Sequence[Sequence[int]] | np.ndarray, waits: Sequence[Sequence[int]]
) -> Links:
    """Sort (row, row that must have run before it, owner of the read), inputs before other waits.

    They come as `walk` takes them.
    """
    found = np.concatenate([np.reshape(each, (-1, 3)) for each in (reads, waits)]).astype(np.int64)
    row, before, owner = found[np.argsort(found[:, 0], kind="stable")].T.copy()
    return starts(np.bincount(row, minlength=rows)), before, owner


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
def walk(known, start, before, owner, heads, head_owner):  # type: ignore[no-untyped-def]
    """Order rows depth first from the heads, each after what it reads.

    The rows below ``known`` have run already: they are put down whenever they are met, with the
    owner of the read.
    """
    rows = start.shape[0] - 1
    seen = np.zeros(rows, dtype=np.bool_)
    stack = np.empty(rows, dtype=np.int64)
    at = np.empty(rows, dtype=np.int64)
    met = np.empty(rows + before.shape[0] + heads.shape[0], dtype=np.int64)
    by = np.full(met.shape[0], -1, dtype=np.int64)  # KEPT
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
