"""One operator at a time: recomputed between kept neighbours, and inside a planned network."""

from __future__ import annotations

import collections
import contextlib
import itertools
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.bind import bind
from memonger.costs.replay import replay
from memonger.graph import marks
from memonger.graph.operators.recompute import (
    ANYWHERE,
    CPU,
    UNREAD_ANYWHERE,
    UNREAD_UNFUSED,
    UNTOUCHED,
)
from memonger.graph.operators.recompute import tolerates_unread, why_kept
from memonger.graph.training import training_graph

from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.layouts import Refused

from drawn_schedules import LEVELS, work_of
from observing import verdicts
from operator_cases import (
    AFTER,
    ALL_CASES,
    BEFORE,
    BLOCKED_SHAPES,
    CASES,
    CASES_OF_NP,
    PLANNED_SHAPES,
    READERS,
    SMALL_SHAPES,
)
from operator_cases import blocked_net, inner, planned_net, small_net
from planned import assert_alike, assert_bound, elsewhere, forward, marked, nodes, positive
from planned import rules_of, run_code, with_marks

ON_CPU: frozenset[str] = frozenset((CPU,))

#: Cases whose operators must be kept, every one by rule.
KEPT = sorted(n for n, c in ALL_CASES.items() if c.draws or "RNN_" in n)
KEPT += ["foreach", "Custom", "moments"]


NAMES = [pytest.param(n, marks=[pytest.mark.slow] * (n in CASES_OF_NP)) for n in ALL_CASES]


def check(symbol: Any, planned: Any, shapes: Any) -> None:
    assert_alike(symbol, planned, shapes, steps=2, values=positive(symbol, shapes))


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_recomputed_alone_changes_no_bit(name: str) -> None:
    """Nor with what it reads and what reads it: what the rules leave of that changes nothing."""
    symbol = small_net(ALL_CASES[name])
    plans = set()  # for any device and for the CPU; often the same
    for targets in (ANYWHERE, ON_CPU):
        rules = rules_of(symbol, SMALL_SHAPES, targets)
        graph = rules.graph
        for extra in ([], [BEFORE, AFTER]):
            wanted = set(inner(symbol) + extra)
            mask = rules.apply(rules.allowed & [n.name in wanted for n in graph.nodes])
            plans.add(tuple(n.name for n, again in zip(graph.nodes, mask) if again))
    for names in sorted(plans):
        check(symbol, with_marks(symbol, names), SMALL_SHAPES)


#: Cases with a gradient in place that has several results, that is laid out, or that is declared
#: to be the one that it reads; and softmax, which must overwrite blocks.
TELLING = """
LeakyReLU_prelu LeakyReLU_elu hard_sigmoid elemwise_sub add_n broadcast_mul FullyConnected
SliceChannel_all softmax
""".split()
#: Not foreach: in the threaded engine MKLDNN may change the layout of an array while it reads that.
PLANNED_CASES = sorted(set(CASES) - {"foreach"})
#: Of all families one.
SOME = [*TELLING, *PLANNED_CASES[::12]]


def by_hand(quick: bool) -> Any:
    return () if quick else pytest.mark.exhaustive


@pytest.mark.parametrize(
    "name, every",
    [
        pytest.param(name, every, marks=by_hand(name in SOME and every == 2))
        for name in PLANNED_CASES
        for every in (2, 5)
    ],
)
def test_an_operator_in_a_planned_network_changes_no_bit(name: str, every: int) -> None:
    """Every second operator is kept, or every fifth."""
    symbol = planned_net(CASES[name])
    rules = rules_of(symbol, PLANNED_SHAPES)
    mask = rules.allowed.copy()
    mask[::every] = False
    mask = rules.apply(mask)
    assert mask.any()
    planned = with_marks(symbol, [n.name for n, m in zip(rules.graph.nodes, mask) if m])
    check(symbol, planned, PLANNED_SHAPES)


#: Not np_vstack, which schedules refuse.
BLOCKED_CASES = sorted(set(ALL_CASES) - {"foreach", "np_vstack"})
ONE_READER = {*zip(BLOCKED_CASES[::20], itertools.cycle(READERS))}


@pytest.mark.parametrize(
    "name, reader",
    [
        pytest.param(name, reader, marks=by_hand(name in TELLING or (name, reader) in ONE_READER))
        for name in BLOCKED_CASES
        for reader in READERS
    ],
)
def test_an_operator_behind_a_convolution_changes_no_bit(name: str, reader: str) -> None:
    """By marks on all, on some, and by schedules, whose memory and layouts are others."""
    symbol, shapes = blocked_net(ALL_CASES[name], reader), BLOCKED_SHAPES
    values = positive(symbol, shapes)
    try:
        memonger.check(symbol, symbol, shapes, 1)
    except memonger.MemongerError as error:
        pytest.skip(f"MXNet cannot train it: {error}")
    rules, random = rules_of(symbol, shapes), np.random.RandomState(0)
    chosen = {
        tuple(rules.apply(rules.allowed & (random.uniform(size=len(rules.allowed)) < share)))
        for share in (1, 0.7, 0.7, 0.4)
    }
    for mask in sorted(chosen):
        names = [n.name for n, again in zip(rules.graph.nodes, mask) if again]
        assert_alike(symbol, with_marks(symbol, names), shapes, steps=1, values=values)
    work = work_of(symbol, shapes, symbol.list_arguments())
    for level, seed in (("three levels", 0), ("three levels", 1), ("everything", 0)):
        with contextlib.suppress(Refused):
            planned = scheduled(symbol, LEVELS[level](work, seed))
            assert_alike(symbol, planned, shapes, steps=1, values=values)


def test_foreach_in_a_planned_network_changes_no_bit() -> None:
    # In the threaded engine MKLDNN may change the layout of an array while the loop reads it.
    call = "t.test_an_operator_in_a_planned_network_changes_no_bit('foreach', {})"
    code = "; ".join(["import test_operators as t", call.format(2), call.format(5)])
    run_code(code, MXNET_ENGINE_TYPE="NaiveEngine")


@pytest.mark.parametrize("name", KEPT)
def test_operators_that_must_run_once_are_kept(name: str) -> None:
    symbol = small_net(ALL_CASES[name])
    planned = memonger.make_mirror_plan(symbol, 0, shapes=SMALL_SHAPES)
    nodes = forward(symbol, SMALL_SHAPES).nodes
    kept = {n.name: n.op for n in nodes if not n.is_variable and why_kept(n.op, n.attrs)}
    assert kept and not set(marked(planned)) & set(kept)
    for node, attributes in planned.attr_dict().items():
        assert kept.get(node) not in UNTOUCHED or "__force_mirroring__" not in attributes


def tolerant_cases() -> list[Any]:
    params = []
    for name, case in ALL_CASES.items():
        symbol = small_net(case)
        names, of_np = set(inner(symbol)), [pytest.mark.slow] * (name in CASES_OF_NP)
        for node in forward(symbol, SMALL_SHAPES).nodes:
            if node.name in names and tolerates_unread(node.op, node.attrs, ["float32"], ON_CPU):
                identity = f"{name}-{node.name}"
                params.append(pytest.param(name, node.name, id=identity, marks=of_np))
    return params


@pytest.mark.parametrize("name, node", tolerant_cases())
def test_an_operator_that_tolerates_to_be_unread_changes_no_bit(name: str, node: str) -> None:
    """Marked alone and without rules; another batch first, whose leavings would show."""
    symbol = small_net(ALL_CASES[name])
    check(symbol, with_marks(symbol, [node]), SMALL_SHAPES)


def test_every_entry_of_the_table_is_tried() -> None:
    symbols = [small_net(case) for case in ALL_CASES.values()]
    tried = {n["op"] for s in symbols for n in nodes(s) if n["name"] in inner(s)}
    conditional = {"BatchNorm", "Convolution", "Deconvolution", "UpSampling"}
    assert (UNREAD_ANYWHERE | UNREAD_UNFUSED | conditional) - tried == set() and len(tried) >= 100


#: Operators whose gradient cannot be observed on a CPU, by what MXNet says. Those of GPUs and of
#: sparse arrays it makes there alone; of the others, with these inputs, it makes none anywhere.
UNOBSERVED = {
    "only available for GPU": "_contrib_count_sketch _contrib_fft _contrib_ifft",
    "Operator not implemented": "_sparse_retain _square_sum",
    "Invalid Parameter format": "sort",
    "not returning enough gradient": "_npi_gamma _npi_uniform _npi_uniform_n",
    "Number of inputs to operator": """_npi_copysign_scalar _npi_ediff1d _npi_gumbel _npi_logistic
        _npi_normal _npi_normal_n _npi_rcopysign_scalar""",
}


@pytest.mark.slow
def test_what_cannot_be_observed_of_all_operators() -> None:
    """All others that are tried are observed, or MXNet says that they have no gradient."""
    verdict_of, _ = elsewhere(verdicts)
    words_of = {op: words for words, ops in UNOBSERVED.items() for op in ops.split()}
    unobserved = {op for op, said in verdict_of.items() if said.startswith("MXNet cannot")}
    assert unobserved == words_of.keys()
    assert all(words in verdict_of[op] for op, words in words_of.items())
    verdict = collections.Counter(verdict_of.values())
    assert verdict["observed"] > 400 and verdict["not tried"] < 150


def test_what_is_computed_on_gpus_alone_is_refused_by_schedules() -> None:
    """Its gradient cannot be observed without one."""
    message = (
        r"'fft0' \(_contrib_fft\) cannot be part of a schedule: .*only available for GPU.*marks"
    )
    with mx.name.NameManager(), pytest.raises(memonger.MemongerError, match=message):
        x = mx.sym.contrib.fft(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4))
        work_of(mx.sym.MakeLoss(x), {"data": (4, 4)})


def test_the_memory_of_marks_is_predicted_where_schedules_refuse() -> None:
    """MXNet makes the gradient without the shape that its symbol needs."""
    symbol = small_net(CASES["gather_nd"])
    graph, rules = forward(symbol, SMALL_SHAPES), rules_of(symbol, SMALL_SHAPES)
    training, mask = training_graph(graph), rules.apply(rules.allowed)
    assert training.inexact == () and mask.any()
    assert_bound(replay(training, mask), bind(marks.apply(symbol, mask), graph, mx.cpu()))
