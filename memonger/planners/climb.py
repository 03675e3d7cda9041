"""Trees of cuts annealed on the exact cost of their schedules, in compiled code.

A step moves, adds or drops a cut, replaces a node by one of its children, or changes what is held
of its left part. Steps for the worse are taken with a probability that falls as the search cools
(Kirkpatrick et al. 1983). The same seed gives the same result.
"""

import numpy as np

from memonger.compiled import compiled
from memonger.planners.binomial import LEAF
from memonger.planners.judge import judge
from memonger.planners.unroll import ALIVE, ALL, NOTHING, ends, unroll

FEW = 3  # times the forward operators per unit of work: more runs than that are of no use


@compiled
def _parts(tree, count):  # type: ignore[no-untyped-def]
    """For each node of a tree the part of the network that it stands for."""
    end = ends(tree)
    part = np.empty((tree.shape[0], 2), dtype=np.int32)
    part[0, 0], part[0, 1] = 0, count
    for q in range(tree.shape[0]):
        if tree[q, 0] != LEAF:
            lo, hi = part[q, 0], part[q, 1]
            cut = min(max(tree[q, 0], lo), hi)
            part[q + 1, 0], part[q + 1, 1] = lo, cut
            part[end[q + 1], 0], part[end[q + 1], 1] = cut, hi
    return part, end


@compiled
def _spliced(tree, start, stop, middle):  # type: ignore[no-untyped-def]
    """A tree with the nodes from start to stop replaced."""
    return np.concatenate((tree[:start], middle, tree[stop:]))


@compiled
def step(tree, count):  # type: ignore[no-untyped-def]
    """A tree with one change, or the tree itself where the change that was drawn cannot be made."""
    leaf = np.array([[LEAF, 0]], dtype=np.int32)
    part, end = _parts(tree, count)
    q = np.random.randint(tree.shape[0])
    lo, hi = part[q, 0], part[q, 1]
    kind = np.random.random()
    if tree[q, 0] == LEAF:
        if hi - lo < 2 or kind >= 0.5:
            return tree
        flag = max(0, np.random.randint(6) - 2)
        cut = np.array([[np.random.randint(lo + 1, hi), flag]], dtype=np.int32)
        return _spliced(tree, q, q + 1, np.concatenate((cut, leaf, leaf)))
    if kind < 0.55:
        far = np.random.randint(1, 13 if np.random.random() < 0.33 else 4)
        cut = tree[q, 0] + (far if np.random.random() < 0.5 else -far)
        if not lo < cut < hi:
            return tree
        tree = tree.copy()
        tree[q, 0] = cut
        return tree
    if kind < 0.62:
        if hi - lo < 2:
            return tree
        tree = tree.copy()
        tree[q, 0] = np.random.randint(lo + 1, hi)
        return tree
    if kind < 0.72:
        flag = np.random.randint(ALIVE, NOTHING + 1)
        tree = tree.copy()
        tree[q, 1] = flag
        if flag == ALL:
            tree = _spliced(tree, q + 1, end[q + 1], leaf)
        return tree
    if kind < 0.8:
        return _spliced(tree, q, end[q], leaf)
    if kind < 0.88:
        return _spliced(tree, q, end[q], tree[end[q + 1] : end[q]])
    return _spliced(tree, q, end[q], tree[q + 1 : end[q + 1]])


@compiled
def price(b, tree, match_ranges, most_work, limit):  # type: ignore[no-untyped-def]
    """Bytes and work of a tree's schedule; bytes of -1 where either is more than allowed."""
    most_events = int(FEW * (2 + most_work / max(1.0, b.steps.work.sum())) * b.node.shape[0])
    events, work = unroll(b.steps, tree, most_work, most_events)
    if work > most_work or events.shape[0] > most_events:
        return -1, work
    return judge(b, events, match_ranges, limit), work


@compiled
def climb(b, tree, match_ranges, most_work, budget, seed, tries, hot, cold, stop, done):  # type: ignore[no-untyped-def]
    """Anneal a tree.

    Parameters
    ----------
    b : Blueprint
    tree : np.ndarray of int32, (nodes, 2)
        One that is allowed.
    match_ranges : np.ndarray
    most_work : float
        No schedule may take more.
    budget : int
        Bytes that no schedule may take more of; the aim is then the least work. 0: the aim is the
        least memory.
    seed, tries : int
    hot, cold : float
        Temperatures at the beginning and at the end, as shares of the cost.
    stop : np.ndarray
        The search ends when its element is not 0; another thread may set it.
    done : np.ndarray
        Its element counts the tries.

    Returns
    -------
    np.ndarray
        The best tree.
    int
        Its bytes.
    float
        Its work.
    """
    np.random.seed(seed)
    count = b.node.shape[0]
    best = tree
    most = budget if budget > 0 else np.int64(2) ** 60
    best_bytes, best_work = price(b, tree, match_ranges, most_work, most)
    if best_bytes < 0:
        return best, best_bytes, best_work
    current = float(best_work if budget > 0 else best_bytes)
    lowest = current
    for k in range(tries):
        if stop[0]:
            break
        done[0] += 1
        new = step(tree, count)
        while np.random.random() < 0.3:
            new = step(new, count)
        if new is tree:
            continue
        heat = hot * (cold / hot) ** (k / tries) * lowest
        limit = current - heat * np.log(1 - np.random.random())  # Metropolis
        if budget > 0:
            found, work = price(b, new, match_ranges, min(most_work, limit), budget)
            cost = work
        else:
            found, work = price(b, new, match_ranges, most_work, int(limit))
            cost = float(found)
        if found < 0 or cost > limit:
            continue
        tree = new
        current = cost
        if (
            (found, work) < (best_bytes, best_work)
            if budget <= 0
            else (work, found)
            < (
                best_work,
                best_bytes,
            )
        ):
            best, best_bytes, best_work = new, found, work
            lowest = min(lowest, cost)
    return best, best_bytes, best_work
