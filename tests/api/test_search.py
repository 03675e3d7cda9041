"""The search for the smallest plan: seeds, annealing, what comes out."""

from __future__ import annotations

import itertools
import os
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from memonger.planners.marks.anneal import cheapest_cuts
from memonger.planners.marks.cuts import Weights, cheap_cuts
from memonger.planners.marks.smallest import behind_copies, copyable
from memonger.support.cache import forget

import networks
from generated import networks as generated
from planned import every_cut, rules_of

pytestmark = pytest.mark.python_differs


@st.composite
def weights(draw: Any) -> Weights:
    """Up to six cuts between pieces of small weights."""
    pieces = draw(st.integers(1, 7))
    number = st.integers(0, 20)
    sums = np.cumsum([0.0] + [draw(number) for _ in range(pieces)])
    highest = [0.0] + [
        sums[k] - draw(st.integers(0, int(sums[k] - sums[k - 1]))) + draw(number)
        for k in range(1, pieces + 1)
    ]
    keep = [0.0] + [float(draw(number)) for _ in range(pieces - 1)] + [0.0]
    return Weights(sums, np.array(highest), np.array(keep))


def kept(w: Weights, cuts: list[int], limit: float) -> float | None:
    """What these cuts keep, or None if a piece needs more than the limit."""
    total, ends = 0.0, [0] + [k + 1 for k in cuts] + [len(w.keep) - 1]
    for i, j in zip(ends, ends[1:]):
        if total + w.highest[i + 1 : j + 1].max() - w.until[i] > limit:
            return None
        total += w.keep[j]
    return total


@settings(max_examples=300, deadline=None)
@given(weights(), st.integers(0, 80))
def test_cheapest_cuts_against_all_sets_of_cuts(w: Weights, limit: int) -> None:
    count = len(w.keep) - 2
    every = [
        kept(w, list(cuts), limit)
        for size in range(count + 1)
        for cuts in itertools.combinations(range(count), size)
    ]
    possible = [total for total in every if total is not None]
    chosen, found = cheapest_cuts(w, float(limit))
    assert found == bool(possible)
    if found:
        assert kept(w, list(chosen), limit) == min(possible)


def test_the_plan_does_not_depend_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: range(cores))
        forget()
        found.append(memonger.plan(*networks.googlenet(batch=2, divide=4), patience=0.5))
    assert found[0].symbol.tojson() == found[1].symbol.tojson() and found[0].recomputed


def test_the_original_plan_of_a_network_without_marks_is_a_candidate() -> None:
    """It recomputes everything, which no set of cuts does: not what comes after the last."""
    head = mx.sym.Activation(mx.sym.var("data"), act_type="softrelu")
    symbol = mx.sym.MakeLoss(head)
    ours = memonger.plan(symbol, {"data": (1, 2)})
    original = memonger.plan(symbol, {"data": (1, 2)}, planner="chen2016")
    assert ours.candidates["no cuts"] == original.counted_bytes
    assert ours.counted_bytes <= original.counted_bytes


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(generated())
def test_never_worse_than_no_plan_nor_the_original(drawn: Any) -> None:
    symbol, shapes = drawn
    ours = memonger.plan(symbol, shapes)
    original = memonger.plan(symbol, shapes, planner="chen2016")
    if ours.planner != "no plan" or original.pool_bytes < ours.unplanned_bytes:
        # Else it only counts less, at 4 bytes to an element.
        assert ours.counted_bytes <= min(original.counted_bytes, ours.candidates["no plan"])
    assert ours.pool_bytes <= ours.unplanned_bytes
    assert ours.recomputed_flops <= 1


def test_cuts_come_after_copies_and_at_marks() -> None:
    symbol, shapes = networks.lstm(steps=6)
    rules = rules_of(symbol, shapes)
    copies = copyable(rules)
    marked = [copy.node for copy in copies[:5]]
    cuts = cheap_cuts(rules.graph, 50, marked)
    assert {cut.after for cut in cuts} >= set(marked)
    assert len(cheap_cuts(rules.graph, 3, marked)) <= 3  # too many marks
    with_them, moved = rules.with_copies(copies)
    nodes = with_them.graph.nodes
    told = {cut.after: cut for cut in every_cut(with_them.graph)}
    followed = {int(moved[c.node]) + k for c in copies for k in range(c.offset)}
    for cut in behind_copies(cuts, moved, copies):
        assert cut.after not in followed
        assert sorted(cut.entries) == sorted(told[cut.after].entries)
        assert any(nodes[i].name.endswith("_keep") for i in cut.keep)
