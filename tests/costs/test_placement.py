"""Tensors in one arena: none overlap that are alive together, and the arena is small."""

from __future__ import annotations

from itertools import permutations
from typing import Any, Tuple

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from memonger.costs.placement import place_items
from memonger.support.kernels import compiled

ALIGNMENT = 64
Placed = Tuple["np.ndarray[Any, np.dtype[np.int64]]", int]  # offsets, and the bytes of the arena
Item = Tuple[int, int, int]  # the first and the last step, and the bytes

ITEMS = st.builds(
    lambda a, b, nbytes: (min(a, b), max(a, b), nbytes),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 8) | st.integers(0, 8).map(lambda n: 1000 * n),
)


def place(items: list[Item], alignment: int = ALIGNMENT) -> Placed:
    start, stop, nbytes = np.array(items, dtype=np.int64).reshape(-1, 3).T
    steps = int(stop.max(initial=-1)) + 1
    return place_items(start.astype(np.int32), stop.astype(np.int32), nbytes, steps, alignment)


def assert_placed(items: list[Item], placed: Placed, alignment: int = ALIGNMENT) -> None:
    """Check that no two items overlap that are alive together, and what the placement tells."""
    offset, arena_bytes = placed
    assert not (offset % alignment).any()
    ends = [-(-(at + n) // alignment) * alignment for at, (_, _, n) in zip(offset, items)]
    assert arena_bytes == max(ends, default=0)
    steps = range(max([stop for _, stop, _ in items], default=-1) + 1)
    alive = [[k for k, (a, b, _) in enumerate(items) if a <= step <= b] for step in steps]
    size = [-(-n // alignment) * alignment for _, _, n in items]
    assert arena_bytes >= max([sum(size[k] for k in now) for now in alive], default=0)
    for now in alive:
        order = sorted([k for k in now if size[k]], key=lambda k: offset[k])
        assert all(ends[a] <= offset[b] for a, b in zip(order, order[1:]))


@settings(max_examples=100, deadline=None)
@given(st.lists(ITEMS, max_size=25), st.sampled_from([1, 64, 256]))
@example([], 64)
def test_nothing_overlaps(items: list[Item], alignment: int) -> None:
    placed, again = place(items, alignment), place(items, alignment)
    assert_placed(items, placed, alignment)
    assert placed[1] == again[1] and np.array_equal(placed[0], again[0])


def test_each_item_takes_the_lowest_gap() -> None:
    random, count = np.random.RandomState(1), 150
    start = random.randint(0, 60, count).astype(np.int32)
    stop = start + random.randint(0, 12, count).astype(np.int32)
    nbytes = random.randint(0, 9, count)
    offset = compiled.place(start, stop, nbytes, 0, 0, 0)
    for k in range(count):
        beside = [j for j in range(k) if start[j] <= stop[k] and stop[j] >= start[k]]
        taken = [(offset[j], offset[j] + nbytes[j]) for j in beside]
        places = sorted([0, *(high for _, high in taken)])
        fits = [at for at in places if all(at + nbytes[k] <= a or at >= b for a, b in taken)]
        assert offset[k] == fits[0]


def smallest(items: list[Item]) -> int:
    """Try every order: one of them, each item put as low as it can be, is the best."""
    best = 2**62
    for order in permutations(items):
        lying: list[tuple[int, Item]] = []
        for start, stop, nbytes in order:
            low = 0
            for at, (first, last, size) in sorted(lying):
                if first <= stop and last >= start:
                    if at - low >= nbytes:
                        break
                    low = max(low, at + size)
            lying.append((low, (start, stop, nbytes)))
        best = min(best, max([at + size for at, (_, _, size) in lying], default=0))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(ITEMS, max_size=5))
@example([(0, 0, 1000), (0, 1, 1), (1, 2, 1), (2, 2, 1000)])  # small items cost a byte if last
def test_few_items_take_the_smallest_arena(items: list[Item]) -> None:
    assert place(items, 1)[1] == smallest(items)


def cut(seed: int, pieces: int, steps: int, nbytes: int) -> list[Item]:
    """Cut an arena into items that fill it at every step."""
    random = np.random.RandomState(seed)
    items = [(0, steps - 1, nbytes)]
    while len(items) < pieces:
        start, stop, size = items.pop(random.randint(len(items)))
        if random.rand() < 0.5 and stop > start:
            middle = random.randint(start, stop)
            items += [(start, middle, size), (middle + 1, stop, size)]
        elif size > 1:
            part = random.randint(1, size)
            items += [(start, stop, part), (start, stop, size - part)]
        else:
            items.append((start, stop, size))
    return items


@pytest.mark.parametrize("pieces, most", [(10, 1.0), (20, 1.02), (60, 1.05)])
def test_an_arena_that_was_cut_is_put_together(pieces: int, most: float) -> None:
    for seed in range(3):
        items = cut(seed, pieces, 50, 1000)
        placed = place(items, 1)
        assert_placed(items, placed, 1)
        assert placed[1] <= 1000 * most
