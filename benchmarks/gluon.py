"""Training steps of Gluon blocks: their CPU time, and the peak resident memory of a process.

    OMP_NUM_THREADS=1 python benchmarks/gluon.py              # all networks
    OMP_NUM_THREADS=1 python benchmarks/gluon.py chain --rounds 5

Each block is trained after ``hybridize()``, with ``static_alloc=True``, and by plans. Memory: each
way in a process of its own, MB (2**20 bytes) by which its resident memory grows from before the
first step to its peak; for marks also the same symbol under Module. Time: the ways take turns in
one process, and the figure is the median of the ratios to the plain step of the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from common import check_names, in_turns, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks

MB = 2**20
STEPS = 3  # in a process that measures memory

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_alloc": {},
    "marks": {},
    "schedule R = 2": {"how": "schedule", "work": 2.0},
    "60 %": {"budget": "60%"},
    "marks, Module": {},
}


def chain() -> tuple[Any, tuple[int, ...]]:
    """100 dense layers."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(100):
            net.add(nn.Dense(256, activation="relu"))
        net.add(nn.Dense(10))
    return net, (2048, 256)


def resnet50() -> tuple[Any, tuple[int, ...]]:
    """ResNet-50 v1, small images."""
    return gluon.model_zoo.vision.resnet50_v1(classes=10, prefix="net_"), (16, 3, 128, 128)


def transformer() -> tuple[Any, tuple[int, ...]]:
    """BERT-base without its vocabulary, 4 sentences of 128 words."""
    symbol, shapes = networks.transformer(batch=4, steps=128, vocabulary=10, dropout=0.1)
    scores = mx.sym.reshape(symbol.get_internals()["decoder_output"], (-1, 128, 10))
    return gluon.SymbolBlock(scores, mx.sym.var("data")), shapes["data"]


NETWORKS: dict[str, Callable[[], Any]] = {
    "chain": chain,
    "resnet50": resnet50,
    "transformer": transformer,
}


def step_of(name: str, way: str, patience: float) -> Callable[[], None]:
    """Make what runs one training step to its end; planned already."""
    net, shape = NETWORKS[name]()
    net.initialize()
    x = mx.nd.random.uniform(0, 10, shape)
    heads = mx.nd.ones((shape[0], *net(x[:1]).shape[1:]))
    y = mx.nd.array(np.arange(heads.size // 10).reshape(heads.shape[:-1]) % 10)
    if way in ("plain", "static_alloc"):
        net.hybridize(static_alloc=way == "static_alloc")
    else:
        memonger.gluon.plan(net, data=shape, patience=patience, **WAYS[way])
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})

    def step() -> None:
        with autograd.record():
            loss = loss_fn(net(x), y)
        loss.backward()
        trainer.step(shape[0])
        mx.nd.waitall()

    if "Module" not in way:
        return step
    return module_step(memonger.gluon.plan_of(net).symbol, x, heads)


def module_step(symbol: Any, x: Any, heads: Any) -> Callable[[], None]:
    """Make what runs one training step of a symbol under Module."""
    module = mx.mod.Module(symbol, label_names=None)
    # What is bound is not resident before it is used, but for what is initialized here.
    module.bind([("data", x.shape)])
    module.init_params()
    module.init_optimizer(optimizer_params={"learning_rate": 1e-4})
    batch = mx.io.DataBatch([x])

    def step() -> None:
        module.forward(batch, is_train=True)
        module.backward([heads])
        module.update()
        mx.nd.waitall()

    return step


def resident(key: str) -> int:
    """Read a line of what Linux tells of this process's memory, in bytes."""
    found = re.search(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def grow(name: str, way: str, patience: float) -> float:
    """Return the MB by which this process grows in a few steps."""
    step = step_of(name, way, patience)
    mx.nd.waitall()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    for _ in range(STEPS):
        step()
    return (resident("VmHWM") - before) / MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps (default: 5)")
    parser.add_argument("--patience", type=float, default=1.0, help="of each search (default: 1)")
    parser.add_argument("--grow", nargs=2, help=argparse.SUPPRESS)  # how this calls itself
    options = parser.parse_args()
    if options.grow:
        name, way = options.grow
        print(grow(name, way, options.patience))
        return
    check_names(parser, options.networks, NETWORKS)
    print(machine())
    for name in options.networks or NETWORKS:
        steps = {way: step_of(name, way, options.patience) for way in WAYS if "Module" not in way}
        seconds = in_turns(steps, options.rounds, time.process_time)
        steps.clear()
        print(f"\n{name}\n{'':16}{'peak MB':>8}{'CPU s a step':>14}{'of plain':>10}")
        for way in WAYS:
            command = [sys.executable, __file__, "--grow", name, way]
            command += ["--patience", str(options.patience)]
            printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()
            line = f"{way:16}{float(printed[-1]):8.0f}"
            if way in seconds:
                ratio = np.median(seconds[way] / seconds["plain"])
                line += f"{np.median(seconds[way]):14.2f}{ratio:10.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
