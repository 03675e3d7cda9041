"""Recursive schedules: the binomial oracle, trees of cuts, their cost, what the search finds."""

from __future__ import annotations

import functools
import os
import random
import sys
from dataclasses import replace
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memonger.planners.annealing import empty_memo
from memonger.planners.candidates import by_memory
from memonger.planners.trees.price import make_problem
from memonger.planners.trees.search import ScheduleSearch
from memonger.planners.trees.trees import ALIVE, LAZY, LEAF, NOTHING, Positions
from memonger.planners.trees.trees import binomial_tree
from memonger.support.kernels import compiled
from memonger.schedules.schedule import Schedule, check
from memonger.schedules.training_step import TrainingStep, arena
from memonger.schedules.expand import make_parts
from memonger.schedules.expand import build_step

import networks
from alive import check_memory
from drawn_schedules import work_of
from efforts import SHORT
from generated import build, recipes
from zoo import TINY, Builders


EFFORT = SHORT[1]  # of a search for schedules


# ---------------------------------------------------------------- the oracle


def chain_of(steps: int) -> Positions:
    """Make equal steps, each of which needs for its reversal what it was computed from."""
    count = np.arange(steps, dtype=np.int32)
    no = np.zeros(steps, dtype=np.bool_)
    before = np.maximum(np.arange(-1, steps, dtype=np.int32), 0)  # the first reads a variable
    last, read = np.append(count[1:], -1).astype(np.int32), (before, count[:-1])
    flags = count == steps - 1, ~no, no
    return Positions(
        *read, *read, last, count + 1, count[-1:], *flags, np.ones(steps), flags[0][:0]
    )


def most_states(steps: int, operations: list[int]) -> int:
    """Return the most states that are held at once by their readers, the first one among them."""
    run_of: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for k, operation in enumerate(operations):
        step = operation if operation >= 0 else -1 - operation
        if step:  # what it reads, as it was made last
            last[(step - 1, run_of[step - 1])] = k
        if operation >= 0:
            run_of[operation] = k
    change = np.zeros(len(operations) + 1, dtype=np.int64)
    for (_, start), stop in last.items():
        change[start] += 1
        change[stop] -= 1
    return 1 + int(np.cumsum(change).max(initial=0))


@functools.lru_cache(None)
def fewest_steps(steps: int, states: int) -> int:
    """Return the forward steps that a chain takes to be reversed, by trying every first cut."""
    if steps <= 1:
        return 0
    if not states:
        return sys.maxsize
    return min(
        m + fewest_steps(m, states) + fewest_steps(steps - m, states - 1) for m in range(1, steps)
    )


def test_fewest_steps_are_those_of_griewank_and_walther() -> None:
    assert fewest_steps(10, 3) == 15  # figure 1 of Griewank and Walther (2000)
    assert fewest_steps(56, 3) == 210  # beta(3, 5) steps: 5 * 56 - beta(4, 4) = 280 - 70


@pytest.mark.parametrize("steps", range(1, 61))
def test_binomial_schedules_take_the_fewest_steps(steps: int) -> None:
    chain = chain_of(steps)
    for states in range(1, steps + 2):
        work, operations = compiled.unroll(chain, binomial_tree(steps, states), np.inf, sys.maxsize)
        # The last step runs once more than it must for its reversal: the network returns it.
        assert (operations >= 0).sum() == work == fewest_steps(steps, states) + 1
        assert [-1 - e for e in operations if e < 0] == list(range(steps - 1, -1, -1))
        # What is being computed comes on top of what is kept.
        assert most_states(steps, operations.tolist()) <= states + 1


@pytest.mark.parametrize("steps, states", [(0, 3), (5, 0), (-1, 1)])
def test_a_chain_of_nothing_cannot_be_reversed(steps: int, states: int) -> None:
    with pytest.raises(memonger.MemongerError, match="cannot be reversed"):
        binomial_tree(steps, states)


# ---------------------------------------------------------------- trees of cuts


def shifted() -> tuple[Any, dict[str, Any]]:
    """Return a network without a loss of which one gradient is that of its output."""
    x = mx.sym.Variable("data")
    for _ in range(16):
        x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=4))
    return mx.sym.elemwise_add(x, mx.sym.Variable("shift")), {"data": (2, 3)}


NETWORKS: Builders = {
    **{name: TINY[name] for name in ("resnet", "lstm", "transformer", "two heads")},
    "chain": lambda: networks.chain(6, hidden=8, batch=4),
    "no loss": shifted,
}


def random_tree(draw: random.Random, lo: int, hi: int, depth: int) -> list[tuple[int, int]]:
    if hi - lo < 2 or depth == 0 or draw.random() < 0.2:
        return [(LEAF, draw.choice([0, LAZY]))]
    cut, flag = draw.randrange(lo + 1, hi), draw.randint(ALIVE, NOTHING)
    left, right = random_tree(draw, lo, cut, depth - 1), random_tree(draw, cut, hi, depth - 1)
    return [(cut, flag), *left, *right]


def same_as_written_out(search: ScheduleSearch, schedule: Schedule) -> None:
    """Check that the schedule is right, and that its cost is that of the step written out.

    But for what is put in for MKLDNN's layouts and for autograd, which is not known before.
    """
    check(search.workload, schedule)
    cost = search.evaluate(schedule)
    parts = replace(make_parts(search.workload), usual=None, recorded={})
    step = build_step(parts, schedule)
    assert cost.nbytes == check_memory(step)
    assert cost.time >= 1 - 1e-9
    runs_in_order(step, schedule)


def names_of(search: ScheduleSearch) -> list[str]:
    return [node.name for node in search.workload.training.graph.nodes]


def runs_in_order(step: TrainingStep, schedule: Schedule) -> None:
    """Check that what runs is what the operations say, in their order, after all that it reads."""
    t, variable = step.parts.variants, step.training.arrays.variable
    expected: list[int] = []
    for operation in schedule.operations.tolist():
        rows = t.operation_row[slice(*t.operation_start[~operation:][:2])]
        expected += [operation] if operation >= 0 else rows.tolist()
    assert [row for row in step.rows.source.tolist() if row >= 0 and not variable[row]] == expected
    reader = np.repeat(np.arange(len(step.rows.source)), np.diff(step.rows.read_start))
    assert (step.rows.read_row < reader).all()


@settings(max_examples=60, deadline=None)
@given(st.randoms(), recipes())
def test_random_trees_of_generated_networks_cost_what_is_written_out(
    draw: random.Random, recipe: Any
) -> None:
    search = ScheduleSearch(work_of(*build(recipe)), EFFORT)
    count = len(search.workload.operators)
    tree = random_tree(draw, 0, count, 5)
    same_as_written_out(search, search.schedule(np.array(tree, dtype=np.int32)))


def test_a_cost_does_not_depend_on_what_was_asked_before() -> None:
    b = make_problem(make_parts(work_of(*NETWORKS["resnet"]())))
    shared, draw = empty_memo(16), random.Random(1)
    outcomes = set()
    for _ in range(300):
        tree = np.array(random_tree(draw, 0, len(b.node), 6), dtype=np.int32)
        alive, work = compiled.evaluate_tree(b, tree, sys.maxsize, sys.maxsize, empty_memo(1))
        limits = work * draw.choice([0.9, 1.0, 1.1]), int(alive * draw.choice([0.9, 1, 1.1]))
        cost, anew = (
            compiled.evaluate_tree(b, tree, *limits, memo) for memo in (shared, empty_memo(1))
        )
        assert cost == anew and cost[0] in (-1, alive)
        outcomes.add(cost[0] < 0)
    assert len(outcomes) == 2


@pytest.mark.parametrize("name", ["resnet", "transformer", "no loss"])
def test_an_arena_is_little_larger_than_what_is_counted(name: str) -> None:
    """The room that aligned tensors need is counted too, and so are the outputs."""
    search = ScheduleSearch(work_of(*NETWORKS[name]()), EFFORT)
    schedule = search.schedule(search.initial_trees()[0].state)
    step = build_step(make_parts(search.workload), schedule)
    counted, taken = search.count_least(schedule), arena(step).pool_bytes
    outputs = int(step.alive.nbytes[step.output_blocks].sum())
    assert search.evaluate(schedule).nbytes + outputs < counted <= taken <= 1.1 * counted


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_found_trees_are_right(name: str) -> None:
    search = ScheduleSearch(work_of(*NETWORKS[name]()), EFFORT)
    trees = search.initial_trees()
    assert len(trees) > 3
    for point in trees[:: max(1, len(trees) // 8)]:
        schedule = search.schedule(point.state)
        same_as_written_out(search, schedule)
        cost = search.evaluate(schedule)
        assert cost.nbytes == point.nbytes
        assert cost.time == pytest.approx(point.time / search.one_pass)


# ---------------------------------------------------------------- what is found


def test_a_chain_is_never_worse_than_binomial() -> None:
    """Equal layers: whatever a binomial schedule does, one that is found does with less or equal.

    A step is a layer (two operators); the gradients of tanh read its result, so the last states of
    the chain are there anyway.
    """
    layers = 30
    search = ScheduleSearch(work_of(*networks.chain(layers, hidden=8, batch=64)), EFFORT.times(0.2))
    for states in (2, 3, 5, 8):
        tree = binomial_tree(layers, states)
        tree[:, 0] = np.where(tree[:, 0] == LEAF, LEAF, 2 * tree[:, 0])
        binomial = search.evaluate(search.schedule(tree))
        best = search.least_memory(binomial.time)
        assert best.time <= binomial.time * (1 + 1e-9)
        assert best.nbytes <= binomial.nbytes


def test_little_patience_tries_few_trees() -> None:
    work, tried = work_of(*NETWORKS["resnet"]()), []
    for patience in (0.05, 1.0, 4.0):
        tried.append(len(ScheduleSearch(work, EFFORT.times(patience)).initial_trees()))
    assert 12 * tried[0] < tried[1] == tried[2]


def test_the_front_has_schedules_of_every_size_that_nothing_found_quickly_beats() -> None:
    """Schedules of every size; none is beaten by what any other search finds quickly."""
    search = ScheduleSearch(work_of(*NETWORKS["resnet"]()), EFFORT.times(0.02))
    smallest = search.least_memory()
    front = search.front()
    alive, works = (
        [candidate.nbytes for candidate in front],
        [candidate.time for candidate in front],
    )
    assert alive == sorted(set(alive), reverse=True) and works == sorted(set(works))
    assert len(front) > 10 and works[0] == 1 and alive[-1] <= smallest.nbytes
    for candidate in front:
        assert by_memory(search.evaluate(candidate.state)) == pytest.approx(by_memory(candidate))
    same_as_written_out(search, front[len(front) // 2].state)
    for point in search.initial_trees():
        within = [w for p, w in zip(alive, works) if p <= point.nbytes]
        assert min(within) <= point.time / search.one_pass * (1 + 1e-9)


def test_work_is_what_the_caller_says() -> None:
    """In any unit; what takes no time is recomputed first."""
    work = work_of(*NETWORKS["resnet"]())
    graph = work.training.graph
    free = np.array([node.op in ("BatchNorm", "Activation", "LeakyReLU") for node in graph.nodes])
    weights = np.where(free, 0.0, 1e-6)
    for scale in (1.0, 1e6):
        search = ScheduleSearch(work, EFFORT.times(0.02), weights=scale * weights)
        front = search.front()
        assert front[0].time == 1
        for candidate in front:
            counts = np.bincount(candidate.state.forwards, minlength=len(weights))
            once = weights[list(work.operators)].sum()
            assert (counts * weights).sum() / once == pytest.approx(candidate.time, rel=1e-6)
        cheap = [candidate for candidate in front if candidate.time == 1]
        assert cheap[-1].nbytes < front[0].nbytes or len(cheap) == 1
        counts = np.bincount(cheap[-1].state.forwards, minlength=len(weights))
        assert free[counts > 1].all() and (counts > 1).any()


#: What runs with three times the work; with another version of Python it may be something else.
ORDER = """
    fc0 tanh0 fc1 tanh1 fc2 tanh2 fc3 tanh3 fc4 tanh4 fc5 tanh5 out -out -tanh5
    tanh3 fc4 tanh4 -fc5 -tanh4
    tanh3 -fc4 -tanh3
    fc0 tanh0 fc1 tanh1 fc2 tanh2 -fc3 -tanh2
    tanh1 -fc2 -tanh1
    fc0 tanh0 -fc1 -tanh0 -fc0
"""


@pytest.mark.parametrize("cores", [1, 7])
def test_the_schedule_does_not_depend_on_the_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    search = ScheduleSearch(work_of(*NETWORKS["chain"]()), EFFORT.times(0.02))
    names, operations = names_of(search), search.least_memory(3.0).state.operations.tolist()
    assert [names[e] if e >= 0 else "-" + names[~e] for e in operations] == ORDER.split()


def test_what_must_not_run_again_runs_once() -> None:
    """A second draw would differ, however deep the schedule is."""
    x = mx.sym.Variable("data")
    for k in range(8):
        x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=16, name=f"fc{k}"), name=f"tanh{k}")
        x = mx.sym.LeakyReLU(x, act_type="rrelu", name=f"draw{k}")[0]
    x = mx.sym.MakeLoss(mx.sym.sum(x), name="loss")
    search = ScheduleSearch(work_of(x, {"data": (64, 16)}), EFFORT.times(0.02))
    schedule, names = search.least_memory().state, names_of(search)
    runs = [names[i] for i in schedule.forwards.tolist()]
    assert len(runs) > len(set(runs)) and sum(name[:4] == "draw" for name in runs) == 8
    same_as_written_out(search, schedule)
