"""Sizes of segments, from which dynamic programming makes trees, as sums over tensors."""

from __future__ import annotations

import numpy as np
from memonger.planners.trees.tree_dp import Sizes
from memonger.planners.trees.trees import ALIVE, ALL, COSTLY, Positions
from memonger.support.kernels import compiled

COUNT, RESULTS = 40, 60


def test_sizes_of_segments_are_sums_over_tensors() -> None:
    random = np.random.RandomState(1)
    start = np.sort(random.randint(0, COUNT, RESULTS))
    stop = np.minimum(start + random.randint(0, 9, RESULTS), COUNT - 1)
    wanted = np.minimum(start + random.randint(0, 12, RESULTS), COUNT)  # COUNT: by no gradient
    size = random.randint(1, 99, RESULTS).astype(np.float64)
    last = np.minimum(np.arange(COUNT) + random.randint(-1, 9, COUNT), COUNT - 1)
    work, costly = random.randint(1, 99, COUNT), random.rand(COUNT) < 0.4
    backward, in_place, passing = random.randint(0, 9, (3, COUNT + 1)).astype(np.float64)
    none, nothing = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
    positions = Positions(
        *[none] * 4,
        last=last.astype(np.int32),
        first_want=none,
        heads=none,
        always_saved=nothing,
        gradient=nothing,
        costly=costly,
        work=work.astype(np.float64),
        forced=nothing,
    )
    sizes = Sizes(start, stop, wanted, size, in_place[:COUNT], backward[:COUNT], passing)
    for bounds in ([0, 1, 7, 20, 33, COUNT], [7, 9, 12, 20]):
        segments = compiled.measure(positions, sizes, np.array(bounds))
        m = len(bounds)
        saved = segments.saved_size.reshape(3, m, m)
        recomputed = segments.recomputed.reshape(3, m, m)
        for t, hi in enumerate(bounds):
            assert segments.gradients[t] == passing[hi]
            for s, lo in enumerate(bounds[:t]):
                inside, here = (start >= lo) & (start < hi), slice(lo, hi)
                alive = size[inside & (stop >= hi)].sum()
                read = inside & (wanted < COUNT) & (np.maximum(stop, wanted) < hi)
                heavy = inside & costly[start] & (stop < hi)
                assert saved[ALIVE, s, t] == alive
                assert saved[ALL, s, t] == alive + size[read].sum()
                assert saved[COSTLY, s, t] == alive + size[heavy].sum()
                again = last[here] < hi  # all others are saved at the end
                assert segments.work[s * m + t] == work[here].sum()
                assert recomputed[ALIVE, s, t] == work[here][again].sum()
                assert recomputed[COSTLY, s, t] == work[here][again & ~costly[here]].sum()
                own = start >= lo
                forward = [size[own & (start <= i) & (stop >= i)].sum() for i in range(lo, hi)]
                base = [size[own & (wanted <= i)].sum() for i in range(lo, hi)]
                assert segments.highest[s * m + t] == (forward - in_place[here]).max()
                assert segments.leaf[s * m + t] == (base + backward[here]).max()
