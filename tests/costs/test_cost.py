"""What costs are: as MXNet reports them, with real element sizes, and without allocating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import pytest

import networks

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
    here = Path(__file__).parents[1] / "helpers"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), *sys.path]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    ).stdout


def test_a_network_that_cannot_be_replayed_is_bound(caplog: pytest.LogCaptureFixture) -> None:
    symbol, shapes = networks.detection(batch=2, image=64, filters=8)
    with caplog.at_level("INFO", "memonger"):
        planned = memonger.search_plan(symbol, shapes=shapes)
    assert "each plan is bound" in caplog.text and "Custom" in caplog.text
    custom = [n for n in json.loads(planned.tojson())["nodes"] if n["op"] == "Custom"]
    assert custom and all("__force_mirroring__" not in n["attrs"] for n in custom)
    assert memonger.check(symbol, planned, shapes)
