"""The search for the smallest plan: seeds, annealing, what comes out."""

from __future__ import annotations

import itertools
import os
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from memonger.costs.replay import replay
from memonger.graph.operators.recompute import ANYWHERE
from memonger.planners.annealing import Cooling, empty_archive, empty_memo
from memonger.planners.marks.copies import copies_at, copyable, cuts_behind_copies
from memonger.planners.marks.cuts import Weights, cheap_cuts
from memonger.planners.marks.cuts import golden_section, walk, weigh
from memonger.planners.marks.rules import Rules
from memonger.planners.marks.search import (
    Effort,
    Goal,
    MarkSearch,
    NodeTimes,
    Phase,
    price_plan,
)
from memonger.planners.candidates import MarkPlan, not_dominated
from memonger.support.cache import forget
from memonger.support.kernels import compiled
from memonger.support.parallel import Threads

import networks
from planned import every_cut, rules_of


@st.composite
def weights(draw: Any) -> Weights:
    pieces = draw(st.integers(1, 7))
    number = st.integers(0, 20)
    sizes = [draw(number) for _ in range(pieces)]
    sums = np.cumsum([0.0, *sizes])
    below = [draw(number) - draw(st.integers(0, size)) for size in sizes]
    keep = [0.0, *(float(draw(number)) for _ in range(pieces - 1)), 0.0]
    return Weights(sums, sums + [0, *below], np.array(keep))


def kept(w: Weights, cuts: list[int], limit: float) -> float | None:
    """What these cuts keep, or None if a piece needs more than the limit."""
    total, ends = 0.0, [0] + [k + 1 for k in cuts] + [len(w.keep) - 1]
    for i, j in zip(ends, ends[1:]):
        if total + w.highest[i + 1 : j + 1].max() - w.until[i] > limit:
            return None
        total += w.keep[j]
    return total


@settings(max_examples=300)
@given(weights(), st.integers(0, 80))
def test_cheapest_cuts_against_all_sets_of_cuts(w: Weights, limit: int) -> None:
    every = range(len(w.keep) - 2)
    sets = itertools.chain.from_iterable(itertools.combinations(every, k) for k in range(7))
    totals = [kept(w, list(cuts), limit) for cuts in sets]
    possible = [total for total in totals if total is not None]
    is_possible, chosen = compiled.cheapest_cuts(w, float(limit))
    assert is_possible == bool(possible)
    if is_possible:
        assert kept(w, list(chosen), limit) == min(possible)


def test_golden_section_finds_the_minimum() -> None:
    points: list[float] = []

    def cost(x: float) -> float:
        points.append(x)
        return (x - 2.2) ** 2

    golden_section(cost, 0.0, 7.0, 16)
    assert len(points) == 16
    assert min(abs(x - 2.2) for x in points) < 0.02


def test_a_walk_divides_evenly() -> None:
    w = Weights(np.arange(102.0), np.zeros(102), np.ones(102))
    for pieces in (2, 5, 10):
        chosen = walk(w, pieces)
        assert pieces - 1 <= len(chosen) <= pieces
        assert np.ptp(np.diff([0] + [k + 1 for k in chosen[: pieces - 1]])) <= 2


def test_weights_of_a_chain() -> None:
    """Gradients read both results of a layer (fc, activation) and the output; few live at once."""
    symbol, shapes = networks.chain(8, hidden=256, batch=256)
    rules = rules_of(symbol, shapes)
    cuts = every_cut(rules.graph)
    w, squares = weigh(rules.trainings[0], cuts, (1.0, 2.0))
    tensor = 4 * 256 * 256
    assert w.until[-1] / tensor == 2 * 8 + 1
    assert (w.keep[1:-1] >= tensor * 0.9).sum() >= 8
    besides = w.highest[1:] - w.until[1:]
    assert besides.max() / tensor <= 4
    assert squares.until[-1] == pytest.approx(w.until[-1] * tensor, rel=0.01)


def unit_times(**seconds_of: tuple[float, float]) -> Callable[[Rules], NodeTimes]:
    """Give each operator 1 and its gradient 2, but for those that are told."""

    def times(rules: Rules) -> NodeTimes:
        nodes = rules.graph.nodes
        pairs = [(0.0, 0.0) if n.is_variable else seconds_of.get(n.op, (1.0, 2.0)) for n in nodes]
        forward, gradient = np.array(pairs).T
        return NodeTimes(forward, gradient, np.ones(len(nodes)))

    return times


def tie_times(forward: float, gradient: float) -> Callable[[Rules], NodeTimes]:
    return unit_times(_copy=(0, 0), _ones=(0, 0), broadcast_mul=(forward, gradient))


def search_of(symbol: Any, shapes: Any, times: Any = None, targets: Any = ANYWHERE) -> MarkSearch:
    rules = rules_of(symbol, shapes, targets)
    cuts = cheap_cuts(rules.graph, 600)
    copies, effort = copies_at(rules, cuts), Effort(patience=0.02)
    return MarkSearch(rules, times or unit_times(), cuts, copies, Threads(), effort)


def of_unet() -> MarkSearch:
    return search_of(*networks.unet(batch=1, image=64))


def random_state(search: MarkSearch, random: np.random.RandomState) -> np.ndarray:
    cuts, nodes = len(search.cuts), len(search.rules.graph.nodes)
    others = random.choice(3, size=nodes, p=[0.8, 0.1, 0.1])
    return np.concatenate([random.uniform(size=cuts) < 0.2, others]).astype(np.int8)


def test_plans_are_evaluated_as_they_are_replayed() -> None:
    """And they obey the rules of every training graph that they were searched for."""
    search = of_unet()
    random, nodes = np.random.RandomState(0), search.rules.graph.nodes
    plans = set()
    for _ in range(20):
        state = random_state(search, random)
        pool, seconds = compiled.evaluate_state(search.space, state)
        mask = compiled.read_state(search.space, state)[0]
        replayed = replay(search.rules.trainings[0], mask)
        assert pool == replayed.pool_bytes
        n = len(mask)
        again = replayed.order[(replayed.order >= n) & (replayed.order < 2 * n)] - n
        assert not any(copy.tie for copy in search.copies)
        places = [search.insertion.new_index[copy.node] for copy in search.copies]
        used = sum(mask[place] and not mask[place + 1] for place in places)
        assert seconds == sum(nodes[i].op != "_copy" for i in again) + 3 * used
        assert (search.rules.apply(mask) == mask).all()
        plans.add(mask.tobytes())
    assert len(plans) == 20


def test_a_plan_without_saved_identities_is_added_without_them() -> None:
    search = of_unet()
    mask = search.plain.apply(search.plain.allowed)
    added = search.add(MarkPlan(mask))
    assert added is not None and search.copies
    plan = search.plan(added)
    assert not plan.copies and (plan.mask == mask).all()
    assert added.pool_bytes == search.plain.replay(mask).pool_bytes


def test_a_set_of_cuts_saves_what_is_alive_there_and_what_comes_after_the_last() -> None:
    symbol, shapes = networks.chain(8, hidden=256, batch=256)
    rules = rules_of(symbol, shapes)
    search = MarkSearch(rules, unit_times(), every_cut(rules.graph), (), Threads(), Effort())
    cuts, n = search.cuts, len(rules.graph.nodes)
    state = np.zeros(len(cuts) + n, dtype=np.int8)
    chosen = [3, 9]
    state[chosen] = 1
    mask = compiled.read_state(search.space, state)[0]
    expected = rules.allowed.copy()
    expected[cuts[9].after + 1 :] = False
    expected[[i for k in chosen for i in cuts[k].keep]] = False
    assert (mask == rules.apply(expected)).all() and mask.any()
    state[len(cuts) :][: cuts[3].after + 1] = 1  # SAVED
    mask = compiled.read_state(search.space, state)[0]
    expected[: cuts[3].after + 1] = False
    assert (mask == rules.apply(expected)).all() and mask.any()


@pytest.mark.parametrize("goal", [Goal(0.0, 1.0, 0.0, 0.5, False), Goal(1e12, 1.0, 1.0, 0.4, True)])
def test_annealing_leaves_the_best_plan(goal: Goal) -> None:
    search = of_unet()
    stop, done = np.zeros((2, 1), dtype=np.int64)
    start = random_state(search, np.random.RandomState(0))

    def energy(state: np.ndarray) -> float:
        pool, seconds = compiled.evaluate_state(search.space, state)
        return goal.byte_price * max(0.0, pool - goal.limit) + goal.second_price * seconds

    # It stays hot, so that the last state is not the best.
    cooling, results = Cooling(7, 400, 0.05, 0.05, unit=energy(start)), []
    for slots in (1, 1, 2**10):
        archive = empty_archive(search.unplanned, 50, start.shape, np.int8)
        to = empty_memo(slots), archive, stop, done
        best = compiled.anneal_masks(search.space, start, goal, cooling, *to)
        visited = archive.states[np.isfinite(archive.seconds)]
        assert energy(best) <= min(map(energy, visited)) < energy(start)
        results.append((best.tobytes(), archive.pools.tobytes(), archive.states.tobytes()))
    assert results[0] == results[1] == results[2]  # the same seed, whatever is remembered
    assert done[0] == 1200
    stop[0] = 1
    best = compiled.anneal_masks(
        search.space, start, goal, cooling, empty_memo(), archive, stop, done
    )
    assert done[0] == 1200 and energy(best) == energy(start)


def test_a_limit_is_kept() -> None:
    search = of_unet()
    stop, done = np.zeros((2, 1), dtype=np.int64)
    nothing = np.zeros(len(search.rules.graph.nodes), dtype=np.bool_)
    limit, state = 0.7 * search.unplanned, compiled.make_state(search.space, nothing)
    archive = empty_archive(search.unplanned, 50, state.shape, np.int8)
    goal = Goal(limit, 1e30, 1.0, 0.4, True)
    best = compiled.anneal_masks(
        search.space,
        state,
        goal,
        Cooling(7, 2000, 5.0, 0.1, 1.0),
        empty_memo(),
        archive,
        stop,
        done,
    )
    pool, seconds = compiled.evaluate_state(search.space, best)
    assert pool <= limit and seconds == archive.seconds[archive.pools <= limit].min()


@pytest.mark.parametrize("most", [1, 57, 10**12 + 7])
def test_the_fastest_of_each_size_is_kept(most: int) -> None:
    """To the byte: no plan is as large as the unplanned network, and is lost for rounding."""
    sizes = 200
    archive = empty_archive(most, sizes, (2,), np.int8)

    def taken() -> list[tuple[int, float]]:
        is_known = np.isfinite(archive.seconds)
        plans = zip(archive.pools[is_known].tolist(), archive.seconds[is_known].tolist())
        return not_dominated(plans, lambda plan: plan)

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
    assert not_dominated(plans[::-1], lambda plan: plan) == [(0, 9), (1, 8), (4, 5)]
    assert not_dominated([], lambda plan: plan) == []


def test_a_product_with_one_takes_time() -> None:
    """Once, where a plan makes use of it, and so does its gradient; nobody reads it again."""
    x = mx.sym.Variable("data")
    for k in range(3):
        x = mx.sym.FullyConnected(x, num_hidden=4, name=f"fc{k}")
        x = mx.sym.clip(x, 0, 6, name=f"clip{k}")
    rules = rules_of(mx.sym.LinearRegressionOutput(x, name="out"), {"data": (8, 4)})
    names = [node.name for node in rules.graph.nodes]
    copies = {names[copy.node]: copy for copy in copyable(rules)}
    assert copies["clip0"].tie and not copies["fc1"].tie
    for recomputed, copied, seconds in (
        (["fc0", "clip0"], ["clip0"], 2 + 320),
        (["fc0", "clip0", "fc1"], [], 3),
        (["fc0", "clip0", "fc1"], ["fc1"], 3),
        (["fc0", "clip0", "fc1"], ["clip0", "fc1"], 3 + 320),
        (["fc0", "clip0", "fc1", "clip1"], ["clip0", "clip1"], 4 + 2 * 320),
    ):
        mask = np.isin(names, recomputed)
        mark_plan = MarkPlan(mask, tuple(copies[name] for name in copied))
        plan = price_plan(rules, tie_times(20, 300), mark_plan)
        assert (plan.plan.mask == mask).all() and [names[c.node] for c in plan.copies] == copied
        assert plan.time == seconds


def test_the_search_tells_what_plans_take() -> None:
    """With all copies in: with those alone that are needed it is as fast, and hardly larger."""
    times = tie_times(7, 30)
    search = search_of(*networks.lstm(steps=6), times)
    search.minimise(search.cuts_by_size(), Phase(4, 1.0, ((0.004, 0.0001),), 0.5))
    search.speed_up()
    assert any(copy.tie for plan in search.plans() for copy in plan.copies)
    for plan in search.plans():
        real = price_plan(search.plain, times, plan.plan)
        assert real.time == plan.time
        assert real.pool_bytes <= 1.001 * plan.pool_bytes  # blocks may be given out otherwise


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
    copies = copyable(rules)
    marked = [copy.node for copy in copies[:5]]
    cuts = cheap_cuts(rules.graph, 50, marked)
    assert {cut.after for cut in cuts} >= set(marked)
    assert len(cheap_cuts(rules.graph, 3, marked)) <= 3  # too many marks
    with_them = rules.with_copies(copies)
    nodes = with_them.graph.nodes
    cut_after = {cut.after: cut for cut in every_cut(with_them.graph)}
    index = with_them.insertion.new_index
    followed = {int(index[c.node]) + k for c in copies for k in range(c.offset)}
    for cut in cuts_behind_copies(cuts, with_them.insertion):
        assert cut.after not in followed
        assert sorted(cut.entries) == sorted(cut_after[cut.after].entries)
        assert any(nodes[i].name.endswith("_keep") for i in cut.keep)
