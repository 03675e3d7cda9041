"""What memory is: in a GPU's blocks (``gpu_dry_run`` asks a GPU for them), and at the least."""

from __future__ import annotations

import sys
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from memonger.costs.lower_bound import find_lower_bound
from memonger.costs.held import round_for_gpu
from memonger.costs.replay import replay
from memonger.graph.training import training_graph
from memonger.schedules.expand import build_step, make_parts
from memonger.solve.memory import predict_step

import networks
from drawn_schedules import LEVELS, work_of
from generated import networks as generated
from planned import forward, rules_of, run_code

S = mx.sym
KB, MB = 2**10, 2**20
ALL = sorted(LEVELS)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_planning_gives_back_what_it_has_taken() -> None:
    """To bind a plan MXNet takes 12 KB for each node, which the allocator would keep."""
    code = """
import gc, memonger, mxnet as mx
S = mx.sym
def told(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key))
def network(layers, channels=128):
    x = S.Variable("data")
    for i in range(layers):  # a depthwise convolution as a split
        parts = S.SliceChannel(x, num_outputs=channels)
        convolved = [S.Convolution(part, kernel=(3, 3), num_filter=1) for part in parts]
        x = S.Activation(S.Concat(*convolved), act_type="relu")
    return S.MakeLoss(x)
def planned(layers):
    plan = memonger.plan(network(layers), data=(1, 128, 32, 32), patience=0.002)
    assert plan.recomputed
planned(1)
gc.collect()
before = told("VmRSS")
planned(8)
gc.collect()
nodes = 8 * (3 * 128 + 3)
print((told("VmHWM") - before) / nodes, (told("VmRSS") - before) / nodes)
"""
    most, held = map(float, run_code(code).split())
    assert held < 13 < most  # KB


def test_nothing_is_allocated() -> None:
    """Planning a network with 4 GB of parameters takes less than 100 MB of memory."""
    code = """
import memonger, mxnet as mx
S = mx.sym
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
small = S.LinearRegressionOutput(S.FullyConnected(S.Variable("data"), num_hidden=4), name="out")
memonger.search_plan(small, data=(2, 3), patience=.02); memonger.pool_bytes(small, data=(2, 3))
x = S.Variable("data")
for i in range(16):
    x = S.Activation(S.FullyConnected(x, num_hidden=8192), act_type="relu")
net = S.LinearRegressionOutput(x, name="out")
before = resident()
cost = memonger.get_cost(net, data=(4096, 8192))
planned = memonger.search_plan(net, patience=.02, data=(4096, 8192))
print(memonger.get_cost(planned, data=(4096, 8192)), cost, resident() - before)
"""
    planned, cost, grown = map(int, run_code(code).split()[-3:])
    assert 0 < planned < cost and grown < 100 * MB


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
def test_rounding(variables: Any, taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert round_for_gpu([*taken]).tolist() == [*taken.values()]


def test_arrays_of_a_chain() -> None:
    """Results of 275 pages; weights of 4.6 MB take 6 MB, biases of 4400 bytes two pages."""
    symbol, shapes = networks.chain(depth=12, hidden=1100, batch=256)
    result, layer = 275 * 4 * KB, 6 * MB + 8 * KB
    plan = memonger.plan(symbol, shapes)
    assert plan.recomputed and plan.pool_bytes % result == 0
    inputs = 2 * result
    assert plan.device_bytes == plan.pool_bytes + 2 * (12 * layer + inputs)
    request = {n: "null" if n in shapes else "write" for n in symbol.list_arguments()}
    plan = memonger.plan(symbol, shapes, grad_req=request)
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
        plan = memonger.plan(net, data=(256, 1024))
        assert plan.device_bytes - plan.pool_bytes == arrays + more


# -- the floor under all plans ----------------------------------------------------------------


def described(symbol: Any, shapes: Any) -> Any:
    """MB of the floor, MB of what runs there itself, and its name."""
    graph = forward(symbol, shapes)
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    training = training_graph(graph, parameters)
    found = find_lower_bound(training)
    return found.nbytes / MB, found.own_bytes / MB, training.names[found.row]


def test_a_chain() -> None:
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


def test_nothing_to_hold() -> None:
    graph = forward(S.BlockGrad(S.Variable("data")), {"data": (4, 4)})
    assert find_lower_bound(training_graph(graph)).nbytes <= 64


@settings(max_examples=150)
@given(generated(), st.integers(0, 2**16), st.sampled_from([0, 0.5, 0.9, 1]), st.sampled_from(ALL))
def test_no_plan_goes_below(drawn: Any, seed: int, share: float, level: str) -> None:
    symbol, shapes = drawn
    rules = rules_of(symbol, shapes)
    chosen = np.random.RandomState(seed).uniform(size=len(rules.graph.nodes)) < share
    mask = rules.apply(chosen & rules.allowed)
    for training in rules.trainings:
        assert (
            find_lower_bound(training).nbytes
            <= replay(training, mask).timeline().live_bytes().max()
        )
    work = work_of(symbol, shapes)
    step = build_step(make_parts(work), LEVELS[level](work, seed))
    memory = predict_step(step)
    assert find_lower_bound(work.training).nbytes <= memory.peak_bytes
