"""What costs are: as MXNet reports them, with real element sizes, and without allocating."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger import marks
from memonger.allocator import replay
from memonger.executor import bind, planned_mb
from memonger.gradients import read_debug_str
from memonger.training import training_graph

import networks
from planned import forward

S = mx.sym
MB = 2**20


def wide(dtype: str = "float32") -> Any:
    x = S.Variable("data")
    for i in range(6):
        x = S.FullyConnected(x, num_hidden=1024, name="fc%d" % i)
        x = S.Activation(x, act_type="tanh")
    return S.LinearRegressionOutput(x, name="out"), {"data": (1024, 1024)}


def test_cost_is_what_simple_bind_reports() -> None:
    symbol, shapes = wide()
    text = symbol.simple_bind(mx.cpu(), grad_req="write", **shapes).debug_str()
    assert "Total %d MB allocated" % memonger.get_cost(symbol, **shapes) in text


def test_real_element_sizes() -> None:
    """1024 x 1024 elements a tensor: 4 MB as MXNet counts, 8 in float64, 2 in float16."""
    symbol, shapes = wide()
    counted = memonger.get_cost(symbol, **shapes)
    assert memonger.pool_bytes(symbol, **shapes) == counted * MB
    for dtype, factor in (("float64", 2), ("float16", 0.5)):
        types = {"data": dtype}
        assert memonger.get_cost(symbol, types, **shapes) == counted
        assert memonger.pool_bytes(symbol, types, **shapes) == counted * MB * factor


def test_real_element_sizes_are_those_that_a_step_takes() -> None:
    """The pool of a float64 network, measured as resident memory of its process."""
    code = """
import conftest, memonger, mxnet as mx, test_cost
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
net, shapes = test_cost.wide()
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
    out = run(code).split()
    measured, predicted = int(out[-2]), int(out[-1])
    assert abs(measured - predicted) < 0.1 * predicted + 8 * MB, out


def test_nothing_is_allocated() -> None:
    """Planning a network with 4 GB of parameters takes less than 100 MB of memory."""
    code = """
import conftest, memonger, mxnet as mx
S = mx.sym
def resident():
    return int(open("/proc/self/statm").read().split()[1]) / 256
small = S.LinearRegressionOutput(S.FullyConnected(S.Variable("data"), num_hidden=4), name="out")
memonger.search_plan(small, data=(2, 3)); memonger.pool_bytes(small, data=(2, 3))
x = S.Variable("data")
for i in range(16):
    x = S.Activation(S.FullyConnected(x, num_hidden=8192), act_type="relu")
net = S.LinearRegressionOutput(x, name="out")
shapes = {"data": (4096, 8192)}
args = net.infer_shape(**shapes)[0]
print(sum(4 * a[0] * (a[1] if len(a) > 1 else 1) for a in args[1:-1]) / 2**30)
before = resident()
cost = memonger.get_cost(net, **shapes)
planned = memonger.search_plan(net, **shapes)
print(cost, memonger.get_cost(planned, **shapes), resident() - before)
"""
    lines = run(code).strip().split("\n")
    parameters, (cost, planned, grown) = float(lines[-2]), map(float, lines[-1].split())
    assert parameters >= 4
    assert 0 < planned < cost
    assert grown < 100


def run(code: str) -> str:
    here = Path(__file__).parent
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), *sys.path]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    ).stdout


NETS: Dict[str, Any] = {
    "resnet": lambda: networks.resnet((2, 2, 2, 2), batch=8),
    "resnet50_v1": lambda: networks.model_zoo("resnet50_v1", 8),
    "resnet50_v2": lambda: networks.model_zoo("resnet50_v2", 8),
    "vgg11": lambda: networks.model_zoo("vgg11", 8),
    "alexnet": lambda: networks.model_zoo("alexnet", 64),
    "squeezenet": lambda: networks.model_zoo("squeezenet1.1", 8),
    "mobilenet": lambda: networks.model_zoo("mobilenetv2_1.0", 8),
    "densenet": lambda: networks.model_zoo("densenet121", 4),
    "inception": lambda: networks.model_zoo("inceptionv3", 4, 299),
    "googlenet": lambda: networks.googlenet(batch=8),
    "unet": lambda: networks.unet(batch=2, image=128),
    "lstm": lambda: networks.lstm(steps=12),
    "lstm, one softmax": lambda: networks.lstm(
        steps=12, concat_decode=True, use_loss=False, dropout=0.3
    ),
    "transformer": lambda: networks.transformer(layers=3, dropout=0.1),
    "highway": lambda: networks.highway(),
    "two heads": lambda: networks.two_heads(),
    "embedding": lambda: networks.embedding_net(),
    "normalised input": lambda: networks.normalised_input(batch=8),
    "chain": lambda: networks.chain(),
}


@pytest.mark.parametrize("name", NETS)
def test_replay_equals_the_bind(name: str) -> None:
    """MB, and the order of the operators, for no plan and a few random ones."""
    symbol, shapes = NETS[name]()
    graph = forward(symbol, shapes)
    training = training_graph(graph)
    assert training.inexact == ()
    random = np.random.RandomState(0)
    movable = np.array([n.op not in ("null", "Dropout") for n in graph.nodes])
    for share in (0, 0.3, 0.6, 0.9, 1):
        mask = movable & (random.uniform(size=len(movable)) < share)
        for i, first in enumerate(training.same):
            mask[i] = mask[first]
        executor = bind(marks.apply(symbol, mask), graph, mx.cpu())
        found = replay(training, mask)
        assert found.pool_bytes // MB == planned_mb(executor)
        ops = [training.ops[row] for row in found.order if training.ops[row] != "null"]
        assert ops == [n["op"] for n in read_debug_str(executor.debug_str())[1]]


@pytest.mark.parametrize("search", ["0", "1"])
@pytest.mark.parametrize("match_range", ["0", "1", "4", "64"])
def test_match_ranges(match_range: str, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (match_range, search) == ("0", "1"):
        pytest.skip("MXNet itself cannot bind with these settings")
    monkeypatch.setenv("NNVM_EXEC_MATCH_RANGE", match_range)
    monkeypatch.setenv("NNVM_AUTO_SEARCH_MATCH_RANGE", search)
    symbol, shapes = networks.model_zoo("mobilenetv2_1.0", 8)
    graph = forward(symbol, shapes)
    found = replay(training_graph(graph), np.zeros(len(graph.nodes), dtype=np.bool_))
    assert found.pool_bytes // MB == planned_mb(bind(symbol, graph, mx.cpu()))


def test_a_network_that_cannot_be_replayed_is_bound(caplog: pytest.LogCaptureFixture) -> None:
    symbol, shapes = networks.detection(batch=2, image=64, filters=8)
    with caplog.at_level("INFO", "memonger"):
        planned = memonger.search_plan(symbol, shapes=shapes)
    assert "each plan is bound" in caplog.text and "Custom" in caplog.text
    custom = [n for n in json.loads(planned.tojson())["nodes"] if n["op"] == "Custom"]
    assert custom and all("__force_mirroring__" not in n["attrs"] for n in custom)
    assert memonger.check(symbol, planned, shapes)
