"""Scheduled networks on MXNet's GPU build: they bind, step, and take the memory predicted.

Schedules are made on the CPU build and carried out on stand-ins for CUDA (see the package's
docstring). Nothing is computed there, so what is seen is memory and which calls were made.
"""

import collections
import re
from typing import Any, Callable, Dict, List, Tuple

import mxnet as mx
import pytest
from memonger.schedule import plain
from memonger.unrolled import parts, unroll

import networks
from schedules import everything, nested, work_of

from .child import DryRun
from .dry_run import GpuDryRun, Result
from .test_networks import LARGE, MB, PATHS, STEPS, as_module

pytestmark = pytest.mark.gpu_dry_run

Network = Tuple[Any, Dict[str, Any]]


def dropped_out() -> Network:
    """Dropouts that run again, and one that runs once."""
    x = mx.sym.Variable("data")
    for k in range(6):
        x = mx.sym.FullyConnected(x, num_hidden=256, name="fc%d" % k)
        x = mx.sym.Dropout(mx.sym.Activation(x, act_type="relu"), p=0.3, name="drop%d" % k)
    x = mx.sym.FullyConnected(x, num_hidden=10, name="last")
    shapes = {"data": (1024, 256), "softmax_label": (1024,)}
    return mx.sym.SoftmaxOutput(x, name="softmax"), shapes


def fused_rnn() -> Network:
    """cuDNN's RNN, between operators that may run again."""
    steps, batch, hidden = 20, 16, 64
    cell = mx.rnn.FusedRNNCell(hidden, num_layers=2, mode="lstm", prefix="lstm_")
    x = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=100, output_dim=hidden, name="embed")
    x, _ = cell.unroll(steps, x, layout="TNC", merge_outputs=True)
    x = mx.sym.Activation(mx.sym.Reshape(x, shape=(-1, hidden)), act_type="tanh")
    x = mx.sym.FullyConnected(x, num_hidden=100, name="decode")
    label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    shapes = {"data": (steps, batch), "softmax_label": (steps, batch)}
    return mx.sym.SoftmaxOutput(x, label, name="softmax"), shapes


NETWORKS: Dict[str, Callable[[], Network]] = {
    "ResNet": lambda: networks.resnet((2, 2, 2, 2)),
    "LSTM": lambda: networks.lstm(layers=2, steps=10, use_loss=False),
    "Dropout": dropped_out,
    "LayerNorm": lambda: networks.transformer(layers=2, dropout=0.1),
    "U-Net": networks.unet,
    "RNN": fused_rnn,
}


def steps(dry: DryRun) -> Any:
    """Bind each symbol with each setting of fusion; take steps, then infer."""
    import gc
    import os
    import re
    import sys

    text, schedules, shapes, fusions, count, types, folders = dry.args
    sys.path[:0] = folders
    import numpy as np
    from memonger.schedule import Schedule
    from memonger.scheduled import scheduled

    import mxnet as mx

    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    net = mx.sym.load_json(text)
    requests = {n: "null" if n in shapes else "write" for n in net.list_arguments()}
    for name, events in schedules.items():
        for fusion in fusions:
            os.environ["MXNET_USE_FUSION"] = fusion  # read at each bind
            dry.note("bind %s %s" % (name, fusion))
            symbol = net
            if events is not None:
                symbol = scheduled(net, Schedule(np.array(events, dtype=np.int32)))
            before = dry.used_bytes()
            executor = symbol.simple_bind(mx.gpu(0), grad_req=requests, type_dict=types, **shapes)
            for array in executor.aux_arrays:
                array[:] = 1
            mx.nd.waitall()
            dry.note("run %s %s" % (name, fusion))
            for _ in range(count):
                executor.forward(is_train=True)
                executor.backward()
                mx.nd.waitall()
            dry.note("ran %s %s" % (name, fusion))
            said = executor.debug_str()
            (pool,) = re.findall(r"Total (\d+) MB allocated", said[-200:])
            dry.reset_peak()
            trained = dry.used_bytes()
            executor.forward(is_train=False)
            mx.nd.waitall()
            dry.emit(
                [name, fusion, int(pool), trained - before, dry.peak_bytes() - before]
                + [said.count("FusedOp"), os.environ["MXNET_USE_FUSION"]]
            )
            del executor, symbol
            gc.collect()
            mx.nd.waitall()
            mx.gpu(0).empty_cache()
    return "done"
