"""Pointwise fusion, replayed: the operators of each fused one are those that MXNet fuses."""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
import numpy as np
import pytest
from memonger.costs.fusion import find_fusible
from memonger.support.kernels import compiled
from memonger.graph.training import training_graph

import networks
from planned import elsewhere, forward, process_mb

S = mx.sym


class Subsets:
    """`GetCompatibleSubsets` of ``src/executor/simple_partition_pass.h``, line for line."""

    def __init__(self, sources: list[list[int]], joins: Any, starts: Any, last: int) -> None:
        self.excluded: list[frozenset[int]] = []
        self.assigned: list[int] = []
        self.mapping: list[int] = []
        self.combined: list[frozenset[int]] = []
        self.first: list[int] = []
        self.inverse: list[frozenset[int]] = []
        for i, read in enumerate(sources):
            self.excluded.append(frozenset().union(*[self.excluded[s] for s in read]))
            self.assigned.append(-1)
            mine = -1
            for s in read:
                theirs = self.mapped(self.assigned[s])
                if theirs == -1:
                    continue
                if not joins[i]:
                    self.excluded[i] |= {theirs}
                elif theirs == mine or (i > last) != (s > last):
                    continue
                elif not self.inverse[theirs] & self.excluded[i]:
                    if mine == -1:
                        mine = theirs
                        self.update(theirs, self.excluded[i], mine, i)
                    else:
                        self.inverse[mine] |= self.inverse[theirs]
                        self.mapping[theirs] = mine
                        self.first[mine] = min(self.first[mine], self.first[theirs])
                        self.update(theirs, self.combined[mine], mine, i)
            if mine == -1 and starts[i]:  # whatever joins also starts
                mine = len(self.mapping)
                self.mapping.append(mine)
                self.combined.append(self.excluded[i])
                self.first.append(i)
                self.inverse.append(frozenset([mine]))
            self.assigned[i] = mine

    def mapped(self, which: int) -> int:
        while which != -1 and self.mapping[which] != which:
            which = self.mapping[which]
        return which

    def update(self, which: int, excluded: frozenset[int], mine: int, i: int) -> None:
        if excluded <= self.combined[which]:
            return
        self.combined[which] |= excluded
        for j in range(self.first[mine], i):
            behind = self.inverse[mine] & self.excluded[j]
            if behind or self.mapped(self.assigned[j]) == mine:
                self.excluded[j] |= self.combined[which]

    def numbered(self) -> list[int]:
        final = [self.mapped(number) for number in self.assigned]
        several = [k for k in range(len(self.mapping)) if final.count(k) > 1]
        return [several.index(k) if k in several else -1 for k in final]


def drawn_network(seed: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Draw a network of many pointwise operators, some of which read from afar."""
    random = np.random.RandomState(seed)
    x = S.Variable("data")
    tensors = [x, S.FullyConnected(x, num_hidden=4)]
    count, reach = random.randint(5, 150), (3, 10, 60, 400)[random.randint(4)]
    pointwise = random.uniform(0.2, 0.95)

    def some() -> Any:
        return tensors[-1 - min(len(tensors) - 1, int(random.exponential(reach)))]

    for _ in range(count):
        a, b = some(), some()
        both = S.slice_axis(a, axis=1, begin=0, end=2), S.slice_axis(b, axis=1, begin=2, end=4)
        fused = a * b, a - b, S.sigmoid(a), S.tanh(a), S.add_n(a, b, some(), some()), a * 2.0
        others = S.FullyConnected(a, num_hidden=4), S.softmax(a), S.Concat(*both), S.BatchNorm(a)
        kinds: Sequence[Any] = fused if random.uniform() < pointwise else others
        tensors.append(kinds[random.randint(len(kinds))])
    heads = [tensors[-1], *[some() for _ in range(random.randint(3))]]
    return S.Group([S.MakeLoss(head) for head in heads]), {"data": (2, 4)}


@pytest.mark.parametrize("first", (0, 120, 520))
def test_sets_are_those_of_mxnet(first: int) -> None:
    """Of random plans of 60 drawn networks; sets become one, and others come to depend on them."""
    for seed in range(first, first + 20):
        graph = forward(*drawn_network(seed))
        training = training_graph(graph)
        t, parts = training.arrays, find_fusible(training)
        entry = t.output_start[t.read_row] + t.read_output
        maker = np.repeat(np.arange(len(t.variable)), np.diff(t.output_start))
        for share in (0.0, 0.5, 0.9, 1.0):
            draws = np.random.RandomState(seed).uniform(size=len(graph.nodes))
            mask = np.array([not node.is_variable for node in graph.nodes]) & (draws < share)
            order, _ = compiled.order_and_reads(t, mask)
            place = np.zeros(len(t.variable), dtype=np.int64)
            place[order] = np.arange(len(order))
            read = compiled.find_entries(t, mask, entry, t.read_row, t.read_owner)
            sources = [place[maker[read[t.read_start[r] : t.read_start[r + 1]]]] for r in order]
            last = place[t.head_row[: t.outputs]].max()
            wanted = Subsets(sources, parts.joins[order], parts.starts[order], last).numbered()
            assert compiled.find_fused_sets(t, parts, mask, order)[1].tolist() == wanted


def mb_of_sets() -> float:
    training = training_graph(forward(*networks.lstm(layers=4, steps=200)))
    t, parts = training.arrays, find_fusible(training)
    mask = np.array([op not in ("null", "Dropout") for op in training.ops[: t.forward]])
    order, _ = compiled.order_and_reads(t, mask)
    before = process_mb("VmHWM")
    assert compiled.find_fused_sets(t, parts, mask, order)[0] > 1600
    return process_mb("VmHWM") - before


def test_sets_of_an_lstm_with_1600_cells_take_little_memory() -> None:
    """Rows times sets in bits were 109 MB."""
    assert elsewhere(mb_of_sets)[0] < 20
