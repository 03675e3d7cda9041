"""Count what one call of memonger meets: functions, files and classes of the package.

    python tests/helpers/concepts.py auto|marks|gluon

It is the length of a reader's way from the call to its result. Printed as JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from types import FrameType
from typing import Any

import memonger
import mxnet as mx
from mxnet.gluon import nn

PACKAGE = os.path.dirname(memonger.__file__) + os.sep


def network() -> Any:
    """A chain of residual blocks, with one of each kind of operator."""
    x = mx.sym.var("data")
    for k in range(4):
        y = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=16, no_bias=True)
        y = mx.sym.Activation(mx.sym.BatchNorm(y, fix_gamma=False), act_type="relu")
        x = y if k == 0 else x + y
    x = mx.sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=10))


def step_of_gluon() -> None:
    """Plan a block and train it for a step."""
    net = nn.HybridSequential()
    for _ in range(4):
        net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Dense(10))
    net.initialize()
    memonger.gluon.plan(net, how="schedule", patience=0.01)
    with mx.autograd.record():
        loss = net(mx.nd.ones((4, 3, 32, 32))).sum()
    loss.backward()
    mx.nd.waitall()
    assert memonger.gluon.plan_of(net)


def main(call: str) -> None:
    functions: set[tuple[str, str, int]] = set()
    classes: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(PACKAGE):
            functions.add((code.co_filename, code.co_name, code.co_firstlineno))
        if code.co_name in ("__init__", "__new__"):
            first = next(iter(frame.f_locals.values()), None)
            made = first if inspect.isclass(first) else type(first)
            if (getattr(made, "__module__", None) or "").startswith("memonger."):
                classes.add(f"{made.__module__}.{made.__qualname__}")

    net = network()
    memonger.plan  # noqa: B018  imports all that is needed
    threading.setprofile(watch)
    sys.setprofile(watch)
    if call == "gluon":
        step_of_gluon()
    else:
        memonger.plan(net, {"data": (4, 3, 32, 32)}, how=call, patience=0.01)
    sys.setprofile(None)
    files = {file for file, *_ in functions}
    print(json.dumps([len(functions), len(files), len(classes)]))


if __name__ == "__main__":
    main(sys.argv[1])
