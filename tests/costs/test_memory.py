"""What memory is: as MXNet reports it, in real element sizes, in a GPU's blocks, and at the least.

That a GPU is asked for these blocks is shown in ``gpu_dry_run/test_networks.py``.
"""

from __future__ import annotations

from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from memonger.costs.lower_bound import lower_bound
from memonger.costs.held import rounded
from memonger.costs.replay import replay
from memonger.graph.training import training_graph
from memonger.schedules.expand import parts, unroll
from memonger.solve.memory import of_step

import networks
from drawn_schedules import LEVELS, work_of
from generated import networks as generated
from planned import forward, rules_of, run_code

S = mx.sym
KB, MB = 2**10, 2**20


def wide() -> Any:
    x = S.Variable("data")
    for i in range(6):
        x = S.FullyConnected(x, num_hidden=1024, name=f"fc{i}")
        x = S.Activation(x, act_type="tanh")
    return S.LinearRegressionOutput(x, name="out"), {"data": (1024, 1024)}


def test_real_element_sizes() -> None:
    """1024 x 1024 elements a tensor: 4 MB as MXNet counts, 8 in float64, 2 in float16."""
    symbol, shapes = wide()
    counted = memonger.get_cost(symbol, **shapes)
    text = symbol.simple_bind(mx.cpu(), grad_req="write", **shapes).debug_str()
    assert f"Total {counted} MB allocated" in text
    assert memonger.pool_bytes(symbol, **shapes) == counted * MB
    for dtype, factor in (("float64", 2), ("float16", 0.5)):
        types = {"data": dtype}
        assert memonger.get_cost(symbol, types, **shapes) == counted
        assert memonger.pool_bytes(symbol, types, **shapes) == counted * MB * factor


RESIDENT = """
import memonger, mxnet as mx, test_memory
S = mx.sym
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""


def test_real_element_sizes_are_those_that_a_step_takes() -> None:
    """The pool of a float64 network, measured as resident memory of its process."""
    code = """
net, shapes = test_memory.wide()
net.simple_bind(mx.cpu(), data=(1, 1024)).forward()
mx.nd.waitall()
executor = net.simple_bind(mx.cpu(), type_dict={"data": "float64"}, **shapes)
for a in executor.arg_arrays + executor.grad_arrays:
    a[:] = 0
mx.nd.waitall()
before = resident()
executor.forward(is_train=True); executor.backward(); mx.nd.waitall()
print(resident() - before, memonger.pool_bytes(net, {"data": "float64"}, **shapes))
"""
    measured, predicted = map(int, run_code(RESIDENT + code).split()[-2:])
    assert abs(measured - predicted) < 0.1 * predicted + 8 * MB


def test_nothing_is_allocated() -> None:
    """Planning a network with 4 GB of parameters takes less than 100 MB of memory."""
    code = """
small = S.LinearRegressionOutput(S.FullyConnected(S.Variable("data"), num_hidden=4), name="out")
memonger.search_plan(small, data=(2, 3), patience=.02); memonger.pool_bytes(small, data=(2, 3))
x = S.Variable("data")
for i in range(16):
    x = S.Activation(S.FullyConnected(x, num_hidden=8192), act_type="relu")
net = S.LinearRegressionOutput(x, name="out")
shapes = {"data": (4096, 8192)}
args = net.infer_shape(**shapes)[0]
parameters = sum(4 * a[0] * (a[1] if len(a) > 1 else 1) for a in args[1:-1])
before = resident()
cost = memonger.get_cost(net, **shapes)
planned = memonger.search_plan(net, patience=.02, **shapes)
print(parameters, memonger.get_cost(planned, **shapes), cost, resident() - before)
"""
    parameters, planned, cost, grown = map(int, run_code(RESIDENT + code).split()[-4:])
    assert parameters >= 4 * 2**30 and 0 < planned < cost and grown < 100 * MB


# -- a GPU's blocks ---------------------------------------------------------------------------

POOL = "MXNET_GPU_MEM_POOL_"
#: Settings; what is asked for and what is taken.
ROUNDED: list[tuple[dict[str, str], list[tuple[int, int]]]] = [
    (
        {},
        [(0, 0), (1, 4 * KB), (4 * KB, 4 * KB), (4 * KB + 1, 8 * KB)]
        + [(2 * MB, 2 * MB), (2 * MB + 1, 4 * MB), (5 * MB, 6 * MB)],
    ),
    (
        {POOL + "PAGE_SIZE": "1024", "MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE": "10240"},
        [(1, KB), (10 * KB, 10 * KB), (10 * KB + 1, 20 * KB)],
    ),
    (
        {POOL + "TYPE": "Round"},
        [(0, 0), (1, 4 * KB), (5 * KB, 8 * KB), (9 * MB, 16 * MB), (16 * MB, 16 * MB)]
        + [(16 * MB + 1, 32 * MB), (33 * MB, 48 * MB)],
    ),
    (
        {POOL + "TYPE": "Round", POOL + "ROUND_LINEAR_CUTOFF": "20"},
        [(600 * KB, MB), (MB + 1, 2 * MB), (2 * MB + 1, 3 * MB)],
    ),
    ({POOL + "TYPE": "Unpooled"}, [(0, 0), (1, 1), (3 * MB + 5, 3 * MB + 5)]),
]


@pytest.mark.parametrize(("variables", "pairs"), ROUNDED)
def test_rounding(variables: Any, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked, taken = zip(*pairs)
    assert rounded(asked).tolist() == list(taken)


def test_arrays_of_a_chain() -> None:
    """Results of 275 pages; weights of 4.6 MB take 6 MB, biases of 4400 bytes two pages."""
    symbol, shapes = networks.chain(depth=12, hidden=1100, batch=256)
    result, layer = 275 * 4 * KB, 6 * MB + 8 * KB
    assert result == 256 * 1100 * 4
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
    outputs = (x, mx.sym.MakeLoss(x), mx.sym.Group([mx.sym.MakeLoss(x), mx.sym.BlockGrad(x)]))
    without_pool = []
    for net in outputs:
        plan = memonger.plan(net, data=(256, 1024))
        pool = plan.pool_bytes
        without_pool.append(plan.device_bytes - pool)
    arrays = 2 * MB + 4 * 4 * KB + 2 * 4 * KB  # data, gamma, beta; moving mean and variance
    assert without_pool == [arrays + MB, arrays, arrays]


# -- the floor under all plans ----------------------------------------------------------------


def described(symbol: Any, shapes: Any) -> Any:
    """MB of the floor, MB of what runs there itself, and its name."""
    graph = forward(symbol, shapes)
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    training = training_graph(graph, parameters)
    found = lower_bound(training)
    return found.nbytes / MB, found.own_bytes / MB, training.names[found.row]


def test_a_chain() -> None:
    """A gradient of tanh has its input, its result and the gradient of that, which it overwrites;
    over it stands the output of the network. A tensor is 1 MiB."""
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


def test_schedules_have_an_order_of_their_own() -> None:
    """In it the gradient of a side branch comes first, and its mask is not held any longer."""
    x = S.Variable("data")
    for i in range(2):
        x = S.Activation(S.FullyConnected(x, num_hidden=1024, name=f"fc{i}"), act_type="tanh")
    aside = S.FullyConnected(S.Dropout(S.Variable("aside"), p=0.5), num_hidden=8, name="side")
    x = S.elemwise_add(S.FullyConnected(x, num_hidden=8, name="last"), aside)
    symbol = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    shapes = {"data": (256, 1024), "aside": (256, 1024), "label": (256, 8)}
    wanted = [name for name in symbol.list_arguments() if name != "label"]
    work = work_of(symbol, shapes, wanted)
    step = unroll(parts(work), LEVELS["everything"](work, 0))
    least = of_step(step, dict.fromkeys(wanted, "write")).peak_bytes
    assert lower_bound(work.training).nbytes == least


def test_nothing_to_hold() -> None:
    graph = forward(S.BlockGrad(S.Variable("data")), {"data": (4, 4)})
    assert lower_bound(training_graph(graph)).nbytes <= 64


@settings(max_examples=150)
@given(generated(), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_no_marks_go_below(drawn: Any, seed: int, share: float) -> None:
    symbol, shapes = drawn
    rules = rules_of(symbol, shapes)
    chosen = np.random.RandomState(seed).uniform(size=len(rules.graph.nodes)) < share
    mask = rules.apply(chosen & rules.allowed)
    for training in rules.trainings:
        assert lower_bound(training).nbytes <= replay(training, mask).timeline().live_bytes().max()


@settings(max_examples=150)
@given(generated(), st.sampled_from(sorted(LEVELS)), st.integers(0, 2**16))
def test_no_schedule_goes_below(drawn: Any, level: str, seed: int) -> None:
    symbol, shapes = drawn
    work = work_of(symbol, shapes)
    step = unroll(parts(work), LEVELS[level](work, seed))
    memory = of_step(step, dict.fromkeys(symbol.list_arguments(), "write"))
    assert lower_bound(work.training).nbytes <= memory.peak_bytes
