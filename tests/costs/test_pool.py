"""The replay of MXNet's memory planner equals MXNet: its total, its order, every block."""

from __future__ import annotations

from typing import Any, Iterator

import mxnet as mx
import numpy as np
import pytest
from memonger.graph import marks
from memonger.costs.pool import pool
from memonger.costs.usage import Usage
from memonger.costs.bind import bind
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.gradients import read_debug_str
from memonger.graph.operators.recompute import CPU, why_kept
from memonger.support.kernels import constant
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.graph.training import TrainingGraph, training_graph

import networks
from memory_log import Job, log_of, logged, stepped
from zoo import LARGE, OPAQUE, TINY, Builders, Network
from planned import assert_bound, forward, rules_of

MB = 2**20


def operators(graph: ForwardGraph) -> np.ndarray:
    """Return all that MXNet can recompute and bind, whatever the plan."""
    return np.array([n.op != "null" and why_kept(n.op, n.attrs) is None for n in graph.nodes])


def random_plans(graph: ForwardGraph, count: int) -> Iterator[np.ndarray]:
    random, movable = np.random.RandomState(7), operators(graph)
    for share in np.linspace(0.02, 0.98, count):
        yield movable & (random.uniform(size=len(movable)) < share)


def few(network: Network, count: int = 2) -> list[np.ndarray]:
    graph = forward(*network)
    return [np.zeros(len(graph.nodes), bool), *random_plans(graph, count), operators(graph)]


# ------------------------------------------------------------------ the total, in MB


def assert_total(symbol: Any, training: TrainingGraph, mask: np.ndarray) -> tuple[Usage, Any]:
    executor = bind(marks.write(symbol, mask), training.graph, mx.cpu())
    replayed = pool(training, mask)
    assert_bound(replayed, executor)
    return replayed, executor


@pytest.mark.parametrize("name", LARGE)
def test_the_replay_has_mxnets_total_order_and_names(name: str) -> None:
    """MXNet has names of its own for some operators."""
    symbol, shapes = LARGE[name]()
    graph = forward(symbol, shapes)
    training = training_graph(graph)
    assert training.inexact == ()
    for mask in few((symbol, shapes)):
        replayed, executor = assert_total(symbol, training, mask[list(training.same)])
        nodes = read_debug_str(executor.debug_str())[1]
        rows = [row for row in replayed.ran.order if training.ops[row] != "null"]
        for row, node in zip(rows, nodes):
            if row < 2 * len(graph.nodes):
                assert training.names[row] == node["name"]


# ------------------------------------------------------------------ entry by entry


def jobs_of(
    network: Network, masks: list[np.ndarray], request: str = "write", but: Any = ()
) -> tuple[list[Job], list[Usage]]:
    """Return what to bind in another process, for all gradients but some; and its replay here."""
    symbol, shapes = network
    graph = forward(symbol, shapes)
    wanted = [a for a in graph.arguments if graph.nodes[a].name not in but]
    training = training_graph(graph, wanted)
    assert training.inexact == ()
    names = [graph.nodes[a].name for a in wanted]
    jobs, plans = [], []
    for mask in (mask[list(training.same)] for mask in masks):
        plans.append(pool(training, mask))
        marked = marks.write(symbol, mask).tojson(remove_amp_cast=False)
        jobs.append(Job(marked, shapes, None, names, request))
    return jobs, plans


@pytest.mark.parametrize(
    "nets",
    [
        pytest.param(TINY, marks=pytest.mark.late),
        OPAQUE,
        pytest.param(LARGE, marks=pytest.mark.exhaustive),
    ],
)
def test_every_entry_is_as_logged(nets: Builders) -> None:
    pairs = [jobs_of(network, few(network)) for network in (build() for build in nets.values())]
    seen = logged([job for jobs, _ in pairs for job in jobs])
    assert [log_of(plan) for _, plans in pairs for plan in plans] == seen


@pytest.mark.slow
def test_every_output_has_the_replayed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is run: outputs have one address if, and only if, the replay gives them one block."""
    # MXNet reads the variable when it first binds, and keeps what it was for all other tests.
    mx.sym.Activation(mx.sym.var("x"), act_type="relu").simple_bind(mx.cpu(), x=(2, 2))
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")  # as in the child: Convolution must be read
    jobs: list[Job] = []
    plans: list[Usage] = []
    added = 0
    nets: Builders = {**TINY, **OPAQUE}
    for name in sorted(nets.keys() - {"fused cells"}):  # these run with MKLDNN alone
        network = nets[name]()
        rules = rules_of(*network, targets=frozenset((CPU,)))
        masks = [rules.apply(mask) for mask in few(network)]
        for request in ("write", "add"):
            of_network = jobs_of(network, masks, request, network[1])  # labels have none
            jobs.extend(of_network[0])
            plans.extend(of_network[1])
    for plan, step in zip(plans, stepped(jobs)):
        training, arrays, blocks = plan.training, plan.training.arrays, plan.block
        placed = iter(step.outputs)
        of_block: dict[int, int] = {}
        for row in plan.ran.order:
            if training.ops[row] == "null":
                continue
            start = int(arrays.output_start[row])
            if training.ops[row] == "_grad_add":
                j = int(arrays.read_start[row]) + 1
                term = int(arrays.output_start[arrays.read_row[j]] + arrays.read_output[j])
                if blocks[term] == blocks[start]:
                    added += 1  # the term was added where the sum is: nothing is left to run
                    continue
            for out in range(start, int(arrays.output_start[row + 1])):
                address = next(placed)
                if blocks[out] == constant("EXTERNAL"):
                    assert address in step.gradients
                else:
                    assert of_block.setdefault(int(blocks[out]), address) == address
        assert next(placed, None) is None
        assert len(set(of_block.values())) == len(of_block)
        assert not set(of_block.values()) & set(step.gradients)
    assert added


# ------------------------------------------------------------------ gradients and settings


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize(
    "name",
    ["two_heads", "many uses", "shared weights", pytest.param("lstm", marks=pytest.mark.late)],
)
def test_gradients_that_are_added_or_left_out(name: str, request_: str) -> None:
    """As Module binds (no gradient of data and labels), with a parameter frozen, of data alone."""
    symbol, shapes = LARGE[name]()
    graph = forward(symbol, shapes)
    training = training_graph(graph)
    names = [graph.nodes[a].name for a in graph.arguments]
    parameters = [a for a, n in zip(graph.arguments, names) if n not in shapes]
    inputs = [a for a, n in zip(graph.arguments, names) if n in shapes]
    totals = set()
    for wanted in (graph.arguments, parameters, parameters[1:], inputs[:1], parameters[-1:]):
        part = training_graph(graph, wanted)
        for mask in few((symbol, shapes), 1):
            mask = mask[list(training.same)]
            executor = bind(marks.write(symbol, mask), graph, mx.cpu(), wanted, request_)
            replayed = pool(part, mask)
            assert_bound(replayed, executor)
            totals.add(replayed.planned_bytes)
    assert len(totals) > 3


#: Not 0 with a search: MXNet itself cannot bind with these settings.
RANGES = [("0", "0"), ("4", "0"), ("1", "1"), ("64", "1")]


@pytest.mark.parametrize("match_range, search", RANGES)
def test_the_replay_follows_the_settings_of_match_ranges(
    match_range: str, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNVM_EXEC_MATCH_RANGE", match_range)
    monkeypatch.setenv("NNVM_AUTO_SEARCH_MATCH_RANGE", search)
    symbol, shapes = networks.model_zoo("mobilenetv2_1.0", 8)
    training = training_graph(forward(symbol, shapes))
    for mask in few((symbol, shapes)):
        assert_total(symbol, training, mask)


def test_what_cannot_be_replayed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = forward(*networks.chain(depth=2))
    monkeypatch.setenv("NNVM_EXEC_NUM_TEMP", "2")
    assert training_graph(graph).inexact == ("NNVM_EXEC_NUM_TEMP is set",)


# ------------------------------------------------------------------ memory over time

#: chain(2), every tensor 1 MB, fc0 and tanh0 recomputed: name, kind, first and last step. Step 0 to
#: 2 are variables. The outputs of a network stay to the end.
TABLE = [
    ("fc0", FORWARD, 3, 3),
    ("tanh0", FORWARD, 4, 12),
    ("fc1", FORWARD, 7, 12),
    ("tanh1", FORWARD, 8, 12),
    ("out", FORWARD, 10, 17),
    ("out_backward", BACKWARD, 11, 11),
    ("tanh1_backward", BACKWARD, 12, 13),
    ("fc1_backward", BACKWARD, 13, 15),
    ("fc0_mirror", RECOMPUTED, 14, 16),
    ("tanh0_mirror", RECOMPUTED, 15, 16),
    ("tanh0_backward", BACKWARD, 16, 17),
]


def test_usage_tells_what_is_alive_when() -> None:
    graph = forward(*networks.chain(depth=2))
    training = training_graph(graph)
    mask = np.array([node.name in ("fc0", "tanh0") for node in graph.nodes])
    usage = pool(training, mask)
    names = [training.names[row] for row in usage.row]
    assert list(zip(names, usage.kind, usage.start, usage.stop)) == TABLE
    assert not usage.output.any() and set(usage.nbytes) == {MB}
    alive = [0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 5, 5, 3, 3, 4, 4, 2]
    assert (usage.count_live() // MB).tolist() == alive
    kinds = [usage.count_live(kind) for kind in (FORWARD, RECOMPUTED, BACKWARD)]
    assert np.array_equal(np.sum(kinds, axis=0), usage.count_live()) and kinds[1].any()


def test_a_network_without_a_pool_has_no_tensors() -> None:
    training = training_graph(forward(mx.sym.Variable("data"), {"data": (2, 2)}))
    usage = pool(training, np.zeros(training.arrays.forward_nodes, dtype=np.bool_))
    assert (len(usage.start), usage.peak_bytes, usage.pool_bytes) == (0, 0, 0)
