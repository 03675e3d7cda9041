"""What memory is: in a GPU's blocks (``gpu_dry_run`` asks a GPU for them), and at the least."""

from __future__ import annotations

import gc
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from memonger.schedules.training_step import arena
from memonger.costs.lower_bound import find_lower_bound
from memonger.costs.held import round_for_gpu
from memonger.costs.pool import pool
from memonger.graph.training import training_graph
from memonger.schedules.expand import build_step, make_parts

import networks
from drawn_schedules import LEVELS, work_of
from generated import networks as generated
from planned import elsewhere, forward, process_mb, rules_of

S = mx.sym
KB, MB = 2**10, 2**20
ALL = sorted(LEVELS)


def many_nodes(layers: int, channels: int = 128) -> Any:
    """Build depthwise convolutions, each as a split."""
    x = S.Variable("data")
    for _ in range(layers):
        parts = S.SliceChannel(x, num_outputs=channels)
        convolved = [S.Convolution(part, kernel=(3, 3), num_filter=1) for part in parts]
        x = S.Activation(S.Concat(*convolved), act_type="relu")
    return S.MakeLoss(x)


def kb_of_a_node() -> list[float]:
    """Return the most by which planning grows this process, and what it leaves."""
    for layers in (1, 8):
        gc.collect()
        before = process_mb()
        plan = memonger.plan(many_nodes(layers), data=(1, 128, 32, 32), patience=0.002, how="marks")
        assert plan.recomputed
        del plan
    gc.collect()
    nodes = 8 * (3 * 128 + 3)
    return [KB * (process_mb(what) - before) / nodes for what in ("VmHWM", "VmRSS")]


@pytest.mark.slow
def test_planning_gives_back_what_it_has_taken() -> None:
    """To bind a plan MXNet takes 12 KB for each node, which the allocator would keep."""
    most, held = elsewhere(kb_of_a_node)[0]
    assert held < 13 < most


def costs_of_a_large_network() -> tuple[int, int, float]:
    """Return the MB of a network with and without a plan, and those that planning takes."""
    small, shapes = networks.chain(1, hidden=4, batch=2)
    memonger.search_plan(small, shapes=shapes), memonger.pool_bytes(small, shapes=shapes)
    symbol, shapes = networks.chain(16, hidden=8192, batch=4096)
    before = process_mb()
    planned = memonger.search_plan(symbol, shapes=shapes, patience=0.02)
    costs = [memonger.get_cost(net, shapes=shapes) for net in (planned, symbol)]
    return costs[0], costs[1], process_mb() - before


@pytest.mark.slow
def test_planning_4_gb_of_parameters_takes_less_than_100_mb() -> None:
    planned, cost, grown = elsewhere(costs_of_a_large_network)[0]
    assert 0 < planned < cost and grown < 100


# -- a GPU's blocks ---------------------------------------------------------------------------

POOL = "MXNET_GPU_MEM_POOL_"
#: Settings; what is asked for and what is taken.
SMALL_PAGES = {POOL + "PAGE_SIZE": "1024", "MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE": "10240"}
ROUND = {POOL + "TYPE": "Round"}
ROUNDED: list[tuple[dict[str, str], dict[int, int]]] = [
    ({}, {0: 0, 1: 4 * KB, 4 * KB: 4 * KB, 4 * KB + 1: 8 * KB}),
    ({}, {2 * MB: 2 * MB, 2 * MB + 1: 4 * MB, 5 * MB: 6 * MB}),
    (SMALL_PAGES, {1: KB, 10 * KB: 10 * KB, 10 * KB + 1: 20 * KB}),
    (ROUND, {0: 0, 1: 4 * KB, 5 * KB: 8 * KB, 9 * MB: 16 * MB, 16 * MB: 16 * MB}),
    (ROUND, {16 * MB + 1: 32 * MB, 33 * MB: 48 * MB}),
    ({**ROUND, POOL + "ROUND_LINEAR_CUTOFF": "20"}, {600 * KB: MB, MB + 1: 2 * MB}),
    ({POOL + "TYPE": "Unpooled"}, {0: 0, 1: 1, 3 * MB + 5: 3 * MB + 5}),
]


@pytest.mark.parametrize("variables, taken", ROUNDED)
def test_blocks_are_rounded_as_the_storage_manager_does(
    variables: Any, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert round_for_gpu([*taken]).tolist() == [*taken.values()]


def test_a_device_has_the_pool_and_the_arrays_of_a_chain() -> None:
    """Results of 275 pages; weights of 4.6 MB take 6 MB, biases of 4400 bytes two pages."""
    symbol, shapes = networks.chain(depth=12, hidden=1100, batch=256)
    result, layer = 275 * 4 * KB, 6 * MB + 8 * KB
    plan = memonger.plan(symbol, shapes, how="marks")
    assert plan.recomputed and plan.pool_bytes % result == 0
    inputs = 2 * result
    assert plan.device_bytes == plan.pool_bytes + 2 * (12 * layer + inputs)
    request = {n: "null" if n in shapes else "write" for n in symbol.list_arguments()}
    plan = memonger.plan(symbol, shapes, grad_req=request, how="marks")
    assert plan.device_bytes == plan.pool_bytes + 2 * 12 * layer + inputs


def test_auxiliary_states_and_gradients_of_outputs() -> None:
    """A loss reads no gradient of its output; any other output takes one more array."""
    x = mx.sym.BatchNorm(mx.sym.Variable("data"))
    arrays = 2 * MB + 4 * 4 * KB + 2 * 4 * KB  # data, gamma, beta; moving mean and variance
    for net, more in (
        (x, MB),
        (mx.sym.MakeLoss(x), 0),
        (mx.sym.Group([mx.sym.MakeLoss(x), mx.sym.BlockGrad(x)]), 0),
    ):
        plan = memonger.plan(net, data=(256, 1024), how="marks")
        assert plan.device_bytes - plan.pool_bytes == arrays + more


# -- the floor under all plans ----------------------------------------------------------------


def described(symbol: Any, shapes: Any) -> Any:
    """Return MB of the floor, MB of what runs there itself, and its name."""
    graph = forward(symbol, shapes)
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    training = training_graph(graph, parameters)
    bound = find_lower_bound(training)
    return bound.nbytes / MB, bound.own_bytes / MB, training.names[bound.row]


def test_the_floor_of_a_chain_is_its_last_gradient() -> None:
    """A gradient of tanh has three tensors of 1 MiB, one overwritten; over it stands the output."""
    assert described(*networks.chain(8)) == (4.0, 3.0, "tanh7_backward")


def test_what_is_computed_once_is_held() -> None:
    """The masks of four Dropouts, 1 MiB each, are there when the gradients begin."""
    symbol, shapes = networks.chain(4)
    plain = described(symbol, shapes)[0]
    x = S.Variable("data")
    for i in range(4):
        x = S.Activation(S.FullyConnected(x, num_hidden=1024, name=f"fc{i}"), act_type="tanh")
        x = S.Dropout(x, p=0.5, name=f"drop{i}")
    dropped = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    assert described(dropped, shapes)[0] == plain + 3  # the gradient of the last has run by then


def test_a_network_without_gradients_has_no_floor() -> None:
    graph = forward(S.BlockGrad(S.Variable("data")), {"data": (4, 4)})
    assert find_lower_bound(training_graph(graph)).nbytes <= 64


@settings(max_examples=60)
@given(generated(), st.integers(0, 2**16), st.sampled_from([0, 0.5, 0.9, 1]), st.sampled_from(ALL))
def test_no_plan_goes_below(drawn: Any, seed: int, share: float, level: str) -> None:
    symbol, shapes = drawn
    rules = rules_of(symbol, shapes)
    chosen = np.random.RandomState(seed).uniform(size=len(rules.graph.nodes)) < share
    mask = rules.apply(chosen & rules.recomputable)
    for training in rules.trainings:
        assert find_lower_bound(training).nbytes <= pool(training, mask).live.max()
    work = work_of(symbol, shapes)
    step = build_step(make_parts(work), LEVELS[level](work, seed))
    memory = arena(step)
    assert find_lower_bound(work.training).nbytes <= memory.peak_bytes


def test_blocks_are_of_whole_float32() -> None:
    """MXNet allocates a block as an array of float32 (``InitDataEntryMemory``)."""
    graph = forward(
        S.MakeLoss(S.tanh(S.Variable("data") * 2)), {"data": (1, 3)}, {"data": "float16"}
    )
    training = training_graph(graph)
    replayed = pool(training, np.zeros(training.arrays.forward_nodes, dtype=np.bool_))
    assert set(replayed.allocated.tolist()) == {8}
