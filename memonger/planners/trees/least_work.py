"""Dynamic programming over trees of cuts: the least forward work within a memory.

As in Revolve (``binomial``), but with the real sizes of ``pieces``: a piece with a memory m is a
leaf, or it is cut where running to the cut, the right part with what is left of m, and the left
part with all of m take least work.
"""

import numpy as np

from memonger.planners.trees.pieces import FLAGS
from memonger.planners.trees.unroll import LEAF, push
from memonger.support.compiled import compiled

IMPOSSIBLE = np.float32(1e30)
DIVIDED = 1


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
def _lower(best, choice, run, right, left, chosen):  # type: ignore[no-untyped-def]
    """Take a choice where it is better.

    Written so that the compiler makes vector instructions of it: nothing is read or stored under a
    condition, and no type is changed in the loop.
    """
    number = np.uint16(chosen)
    for k in range(best.shape[0]):
        total = run + right[k] + left[k]
        known, made = best[k], choice[k]
        better = total < known
        best[k] = total if better else known
        choice[k] = number if better else made


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
    nothing_left = np.zeros(slots + 1, dtype=np.float32)
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
                least = max(through, shift)
                right, left = best[c, t, least - shift :], best[s, c, least:]
                _lower(best[s, t, least:], choice[s, t, least:], run, right, left, 4 * c)
                if nothing:
                    continue
                for flag in range(1, FLAGS):
                    shift = _slot(max(x.kept[flag, s, c, power], held), unit, far)
                    least = max(shift, through, _slot(x.leaf[flag, s, c, power], unit, far))
                    run = np.float32(x.work[s, c] + x.leaf_work[flag, s, c])
                    right, left = best[c, t, least - shift :], nothing_left[least:]
                    _lower(best[s, t, least:], choice[s, t, least:], run, right, left, 4 * c + flag)
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
    pending = np.empty((2 * m, 3), dtype=np.int64)
    depth, count = push(pending, 0, 0, m - 1, slot), 0
    while depth:
        depth -= 1
        s, t, k = pending[depth, 0], pending[depth, 1], pending[depth, 2]
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
        depth = push(pending, depth, c, t, k - _slot(held, unit, slots + 1))
        depth = push(pending, depth, -1 if flag else s, c, k)
    return tree[:count]
