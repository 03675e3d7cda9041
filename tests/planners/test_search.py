"""The search for the smallest plan: seeds, annealing, what comes out."""

from __future__ import annotations

import os
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.pool import pool
from memonger.graph.operators.recompute import ANYWHERE
from memonger.planners.annealing import Cooling, empty_archive, empty_memo
from memonger.planners.marks.identities import (
    identities_at,
    list_identities,
    cuts_behind_identities,
)
from memonger.planners.marks.cuts import cheap_cuts, walk
from memonger.planners.marks.rules import Rules
from memonger.planners.marks.search import MarkEffort, MarkSearch
from memonger.planners.marks.smallest import price_plan
from memonger.planners.candidates import MarkPlan, by_time, pareto_front
from memonger.support.cache import forget
from memonger.support.kernels import compiled
from memonger.support.parallel import Threads

import networks
from planned import every_cut, rules_of


def test_a_walk_divides_evenly() -> None:
    until, size = np.arange(1.0, 101), np.ones(100)
    for pieces in (2, 5, 10):
        chosen = walk(until, size, pieces)
        assert pieces - 1 <= len(chosen) <= pieces
        assert np.ptp(np.diff([0] + [k + 1 for k in chosen[: pieces - 1]])) <= 2


def test_a_walk_takes_the_cut_that_keeps_least_nearby() -> None:
    size = np.full(100, 50.0)
    size[[29, 61]] = 1
    assert walk(np.arange(1.0, 101), size, 3)[:2] == [29, 61]


def unit_times(rules: Rules) -> np.ndarray:
    """Give each operator a second."""
    return np.array([float(not node.is_variable) for node in rules.graph.nodes])


def search_of(symbol: Any, shapes: Any, targets: Any = ANYWHERE) -> MarkSearch:
    rules = rules_of(symbol, shapes, targets)
    cuts = cheap_cuts(rules.graph, 600)
    copies, effort = identities_at(rules, cuts), MarkEffort(patience=0.02)
    return MarkSearch(rules, unit_times(rules), cuts, copies, Threads(), effort)


def of_unet() -> MarkSearch:
    return search_of(*networks.unet(batch=1, image=64))


def random_state(search: MarkSearch, random: np.random.RandomState) -> np.ndarray:
    return (random.uniform(size=len(search.cuts)) < 0.2).astype(np.int8)


def test_plans_are_evaluated_as_they_are_replayed() -> None:
    """And they obey the rules of every training graph that they were searched for."""
    search = of_unet()
    random, nodes = np.random.RandomState(0), search.rules.graph.nodes
    plans = set()
    for _ in range(20):
        state = random_state(search, random)
        nbytes, seconds = compiled.evaluate_state(search.space, state)
        mask = compiled.read_state(search.space, state)[0]
        replayed = pool(search.rules.trainings[0], mask)
        assert nbytes == replayed.planned_bytes
        n = len(mask)
        again = replayed.ran.order[(replayed.ran.order >= n) & (replayed.ran.order < 2 * n)] - n
        assert seconds == sum(not nodes[i].is_inserted for i in again)
        assert (search.rules.apply(mask) == mask).all()
        plans.add(mask.tobytes())
    assert len(plans) == 20


def test_a_set_of_cuts_saves_what_is_alive_there_and_what_comes_after_the_last() -> None:
    """At each place where more than one result is alive a cut saves the newest alone."""
    x = y = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="skip")
    for k in range(6):
        y = mx.sym.FullyConnected(mx.sym.tanh(y, name=f"tanh{k}"), num_hidden=8, name=f"fc{k}")
    symbol = mx.sym.LinearRegressionOutput(x + y, name="out")
    rules = rules_of(symbol, {"data": (4, 8)})
    places, seconds = every_cut(rules.graph), unit_times(rules)
    search = MarkSearch(rules, seconds, places, (), Threads(), MarkEffort())
    names = [node.name for node in rules.graph.nodes]
    saved = [(names[cut.after], [names[i] for i in cut.keep]) for cut in search.cuts]
    assert saved[:2] == [("skip", ["skip"]), ("tanh0", ["skip", "tanh0"])]
    assert saved[2:4] == [("tanh0", ["tanh0"]), ("fc0", ["skip", "fc0"])]
    for chosen in ([1, 9], [2, 10], [13]):
        state = np.zeros(len(search.cuts), dtype=np.int8)
        state[chosen] = 1
        mask = compiled.read_state(search.space, state)[0]
        expected = rules.recomputable.copy()
        expected[search.cuts[chosen[-1]].after + 1 :] = False
        expected[[i for k in chosen for i in search.cuts[k].keep]] = False
        assert (mask == rules.apply(expected)).all() and mask.any()


def test_annealing_leaves_the_smallest_plan() -> None:
    search = of_unet()
    stop, done = np.zeros((2, 1), dtype=np.int64)
    start = random_state(search, np.random.RandomState(0))

    def pool(state: np.ndarray) -> int:
        return compiled.evaluate_state(search.space, state)[0]

    # It stays hot, so that the last state is not the best.
    cooling, results = Cooling(7, 400, 0.05, 0.05, unit=float(pool(start))), []
    for slots in (1, 1, 2**10):
        archive = empty_archive(search.archive.most_bytes, 50, start.shape, np.int8)
        to = empty_memo(slots), archive, stop, done
        best = compiled.anneal_masks(search.space, start, cooling, *to)
        visited = archive.states[np.isfinite(archive.seconds)]
        assert pool(best) <= min(map(pool, visited)) < pool(start)
        results.append((best.tobytes(), archive.pools.tobytes(), archive.states.tobytes()))
    assert results[0] == results[1] == results[2]  # the same seed, whatever is remembered
    assert done[0] == 1200
    stop[0] = 1
    best = compiled.anneal_masks(search.space, start, cooling, empty_memo(), archive, stop, done)
    assert done[0] == 1200 and pool(best) == pool(start)


def test_beginnings_of_the_smallest_plan_are_archived() -> None:
    """What saves at its first cuts alone recomputes less, and takes less time."""
    search = of_unet()
    least = search.minimise()
    plans = pareto_front(search.archive.points(), by_time)
    assert plans[-1].nbytes <= least.nbytes
    assert plans[0].time < 0.7 * least.time and len(plans) > 5


@pytest.mark.parametrize("most", [1, 57, 10**12 + 7])
def test_the_fastest_of_each_size_is_kept(most: int) -> None:
    """To the byte: no plan is as large as the unplanned network, and is lost for rounding."""
    sizes = 200
    archive = empty_archive(most, sizes, (2,), np.int8)

    def taken() -> list[tuple[int, float]]:
        is_known = np.isfinite(archive.seconds)
        plans = zip(archive.pools[is_known].tolist(), archive.seconds[is_known].tolist())
        return pareto_front(plans, lambda plan: plan)

    compiled.record(archive, most + 1, 0.0, np.array([1, 1], np.int8))
    assert taken() == []
    compiled.record(archive, most, 1.0, np.array([0, 0], np.int8))
    assert taken() == [(most, 1.0)]
    smaller = most * (sizes - 1) // sizes  # the largest of the size below
    compiled.record(archive, smaller, 2.0, np.array([1, 0], np.int8))
    compiled.record(archive, smaller, 3.0, np.array([0, 1], np.int8))
    assert taken() == [(smaller, 2.0), (most, 1.0)]
    compiled.record(archive, smaller, 0.5, np.array([0, 1], np.int8))
    assert taken() == [(smaller, 0.5)] and archive.states.sum() == 1


def test_not_dominated_keeps_the_pareto_front() -> None:
    plans = [(0, 9), (1, 8), (2, 8), (3, 9), (4, 5), (4, 6)]
    assert pareto_front(plans[::-1], lambda plan: plan) == [(0, 9), (1, 8), (4, 5)]
    assert pareto_front([], lambda plan: plan) == []


def test_plans_are_priced_as_they_are_carried_out() -> None:
    """With those saved identities alone that they need, which take no time."""
    x = mx.sym.Variable("data")
    for k in range(3):
        x = mx.sym.FullyConnected(x, num_hidden=4, name=f"fc{k}")
        x = mx.sym.clip(x, 0, 6, name=f"clip{k}")
    rules = rules_of(mx.sym.LinearRegressionOutput(x, name="out"), {"data": (8, 4)})
    names = [node.name for node in rules.graph.nodes]
    copies = {names[copy.node]: copy for copy in list_identities(rules)}
    assert copies["clip0"].tied_dtype and not copies["fc1"].tied_dtype
    for recomputed, copied in (
        (["fc0", "clip0"], ["clip0"]),
        (["fc0", "clip0", "fc1"], []),
        (["fc0", "clip0", "fc1"], ["clip0", "fc1"]),
    ):
        mask = np.isin(names, recomputed)
        offered = tuple(copies[name] for name in {*copied, "fc2"})
        plan = price_plan(rules, unit_times(rules), MarkPlan(mask, tuple(sorted(offered))), "it")
        assert (plan.recomputed() == mask).all()
        assert [names[c.node] for c in plan.identities] == copied
        assert plan.seconds == len(recomputed) and plan.origin == "it"


def test_the_plan_does_not_depend_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: range(cores))
        forget()
        plans.append(
            memonger.plan(*networks.googlenet(batch=2, divide=4), patience=0.5, how="marks")
        )
    assert plans[0].symbol.tojson() == plans[1].symbol.tojson() and plans[0].recomputed


def test_the_original_plan_of_a_network_without_marks_is_a_candidate() -> None:
    """It recomputes everything, which no set of cuts does: not what comes after the last."""
    head = mx.sym.Activation(mx.sym.var("data"), act_type="softrelu")
    symbol = mx.sym.MakeLoss(head)
    ours = memonger.plan(symbol, {"data": (1, 2)}, how="marks")
    original = memonger.plan(symbol, {"data": (1, 2)}, planner="chen2016")
    assert ours.candidates["no cuts"] == original.counted_bytes
    assert ours.counted_bytes <= original.counted_bytes


def test_cuts_come_after_copies_and_at_marks() -> None:
    symbol, shapes = networks.lstm(steps=6)
    rules = rules_of(symbol, shapes)
    copies = list_identities(rules)
    marked = [copy.node for copy in copies[:5]]
    cuts = cheap_cuts(rules.graph, 50, marked)
    assert {cut.after for cut in cuts} >= set(marked)
    assert len(cheap_cuts(rules.graph, 3, marked)) <= 3  # too many marks
    with_them = rules.with_identities(copies)
    nodes = with_them.graph.nodes
    cut_after = {cut.after: cut for cut in every_cut(with_them.graph)}
    index = with_them.insertion.new_index
    followed = {int(index[c.node]) + k for c in copies for k in range(c.offset)}
    for cut in cuts_behind_identities(cuts, with_them.insertion):
        assert cut.after not in followed
        assert sorted(cut.entries) == sorted(cut_after[cut.after].entries)
        assert any(nodes[i].name.endswith("_keep") for i in cut.keep)
