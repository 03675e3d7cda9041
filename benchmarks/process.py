"""Peak memory of processes that train by plans and without, against what the plans tell.

    OMP_NUM_THREADS=1 python benchmarks/process.py               # all scripts
    OMP_NUM_THREADS=1 python benchmarks/process.py decoder --rounds 5

Each script runs by ``memonger.enable`` and without, in turns, in processes of its own. "Taken" is
the resident memory, MB (2**20 bytes), by which a process grows from before its first step to its
peak in the steps after that (the search for a plan is over then): the median of the rounds. "Told"
is the pool of the plan, or of the network without it, and what operators hold and share, where a
plan covers all that a step computes; other scripts compute something beside their planned blocks,
or call a block many times. What a plan takes in Python is in "taken": up to 30 MB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
from memonger.costs.held import find_held
from memonger.costs.pool import pool
from memonger.gluon.cached_op import count_bytes
from memonger.graph.read import forward_graph
from memonger.graph.training import training_graph
from memonger.schedules.training_step import arena
from memonger.solve.facts import find_wanted
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

from common import check_names, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks

MB = 2**20
STEPS = 4
Step = Callable[[], None]


def module(network: Any) -> Step:
    """Train a network by Module."""
    symbol, shapes = network
    labels = [name for name in shapes if name.endswith("label")]
    data = [name for name in shapes if name not in labels]
    trained = mx.mod.Module(symbol, data, labels)
    trained.bind(*([(name, shapes[name]) for name in names] for names in (data, labels)))
    trained.init_params(mx.init.Xavier())
    trained.init_optimizer()
    arrays = ([mx.nd.ones(shapes[name]) for name in names] for names in (data, labels))
    batch = mx.io.DataBatch(*arrays)

    def step() -> None:
        trained.forward_backward(batch)
        trained.update()

    return step


def lstm() -> Any:
    """Unrolled LSTM, 2 layers x 40 steps."""
    return networks.lstm(2, 40, batch=32, hidden=256, labels=500, use_loss=False)


class WithLoss(gluon.HybridBlock):
    """A network and its loss in one block."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.loss = net, gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:
        return self.loss(self.net(x), y)


def block(net: Any, x: Any, y: Any, inside: bool = True, calls: int = 1) -> Step:
    """Train a block, with its loss inside or outside, called once or several times in a step."""
    net.initialize(mx.init.Xavier())
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trained = WithLoss(net) if inside else net
    trained.hybridize(), loss.hybridize()
    net(x[:1])  # which makes the parameters
    net.collect_params().zero_grad()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})

    def step() -> None:
        with autograd.record():
            if inside:
                found = [trained(x, y) for _ in range(calls)]
            else:
                found = [loss(trained(x), y) for _ in range(calls)]
            total = sum(each.mean() for each in found)
        del found
        total.backward()
        trainer.step(1)

    return step


def words(layers: int, inside: bool) -> Step:
    """Language model: logits of 10000 words that take 58 MB."""
    net = nn.HybridSequential()
    net.add(nn.Embedding(10000, 128))
    for _ in range(layers):
        net.add(nn.Dense(128, flatten=False, activation="relu"), nn.LayerNorm())
    net.add(nn.Dense(10000, flatten=False))
    return block(net, mx.nd.ones((24, 64)), mx.nd.zeros((24, 64)), inside)


def dense(depth: int, units: int, batch: int, calls: int = 1) -> Step:
    """Dense layers with BatchNorm."""
    net = nn.HybridSequential()
    for _ in range(depth):
        net.add(nn.Dense(units), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Dense(10))
    return block(net, mx.nd.ones((batch, units)), mx.nd.zeros((batch,)), calls=calls)


def convolutions(calls: int, batch: int, side: int) -> Step:
    """Convolutions, called once or several times."""
    net = nn.HybridSequential()
    for filters in (16, 16, 32, 32):
        for stride in (1, 2):
            net.add(nn.Conv2D(filters, 3, stride, 1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Dense(6))
    x, y = mx.nd.ones((batch, 4, side, side)), mx.nd.zeros((batch,))
    return block(net, x, y, inside=calls == 1, calls=calls)


class Decoder(gluon.HybridBlock):
    """A step of a recurrent decoder."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cells = [rnn.LSTMCell(hidden, input_size=hidden) for _ in range(2)]
        for cell in self.cells:
            self.register_child(cell)
        self.out = nn.Dense(50, in_units=hidden)

    def hybrid_forward(self, F: Any, x: Any, *states: Any) -> Any:
        x, first = self.cells[0](x, list(states[:2]))
        x, second = self.cells[1](x, list(states[2:]))
        return (self.out(x), *first, *second)


def decoder(steps: int, batch: int, hidden: int) -> Step:
    """Call a decoder once for each time step."""
    net, loss = Decoder(hidden), gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net.collect_params().zero_grad()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    xs = mx.nd.ones((steps, batch, hidden))

    def step() -> None:
        states = [mx.nd.zeros((batch, hidden)) for _ in range(4)]
        total = mx.nd.zeros((1,))
        with autograd.record():
            for k in range(steps):
                y, *states = net(xs[k], *states)
                total = total + loss(y, mx.nd.ones((batch,))).mean()
        total.backward()
        trainer.step(1)

    return step


#: Script -> what makes its step, and whether a plan covers all that the step computes.
SCRIPTS: dict[str, tuple[Callable[[], Step], bool]] = {
    "Module, ResNet-50 v2": (lambda: module(networks.resnet_v2(batch=8, image=128)), True),
    "Module, GoogLeNet": (lambda: module(networks.googlenet(batch=8, image=128)), True),
    "Module, LSTM": (lambda: module(lstm()), True),
    "dense": (lambda: dense(60, 256, 2048), True),
    "dense, two calls": (lambda: dense(60, 256, 1024, calls=2), False),
    "convolutions": (lambda: convolutions(1, 64, 64), True),
    "convolutions, 100 calls": (lambda: convolutions(100, 1, 64), False),
    "words, 40 layers, loss inside": (lambda: words(40, inside=True), True),
    "words, 4 layers, loss outside": (lambda: words(4, inside=False), False),
    "words, 40 layers, loss outside": (lambda: words(40, inside=False), False),
    "decoder, 60 x 32 x 128": (lambda: decoder(60, 32, 128), False),
    "decoder, 60 x 128 x 256": (lambda: decoder(60, 128, 256), False),
}


def resident(what: str = "VmRSS") -> float:
    """Return the MB of this process in memory: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def told_by(plan: Any) -> tuple[int, int]:
    """Return what a plan tells that a step takes without it and by it, of which nothing is there.

    Parameters, their gradients and inputs are there before the step. The plan of a block is for any
    device: what operators hold on this one is counted here. Gluon's take turns without a plan too,
    and it does not copy gradients of outputs as MXNet's executor does.
    """
    own = plan.pool_bytes + plan.held_bytes + plan.temporary_bytes
    if not plan.of_block:
        return plan.unplanned_device_bytes - (plan.device_bytes - own), own
    request, count = plan.request, count_bytes(plan, [])
    graph = forward_graph(request.symbol, request.spec)
    held = find_held(graph, "cpu", mkldnn=True)
    training = training_graph(graph, find_wanted(graph, request.grad_req))
    plain = pool(training, np.zeros(len(graph.nodes), dtype=np.bool_), held)
    of_plan = forward_graph(plan.symbol, request.spec)
    step = arena(plan.symbol.find_step(of_plan, request.grad_req, True), held)
    before = count.plain + replace(plain, is_arena=True).temporary_bytes
    return before, count.planned + step.temporary_bytes


def run(name: str, is_planned: bool) -> None:
    """Train by one script, and print what it takes."""
    # What is bound for training is planned from the start.
    session = memonger.enable(cache=False, how="auto") if is_planned else None
    step = SCRIPTS[name][0]()
    mx.nd.waitall()
    before, seconds = resident(), []
    for k in range(STEPS):
        start = time.process_time()
        step()
        mx.nd.waitall()
        seconds.append(time.process_time() - start)
        if k == 0:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    told = [0, 0]
    for plan in session.plans if session and SCRIPTS[name][1] else []:
        told = [max(pair) for pair in zip(told, told_by(plan))]
    print(json.dumps([resident("VmHWM") - before, statistics.median(seconds[1:]), told]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="the beginning of names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=("plain", "planned"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run(options.scripts[0], options.one == "planned")
        return
    chosen = options.scripts or [""]
    names = [name for name in SCRIPTS if name.startswith(tuple(chosen))]
    check_names(parser, names or options.scripts, SCRIPTS)
    print(machine())
    print("| script | plain: told | taken | by plan: told | taken | share | CPU time |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        taken: dict[str, list[float]] = {"plain": [], "planned": []}
        seconds: dict[str, list[float]] = {"plain": [], "planned": []}
        for _ in range(options.rounds):
            for way in taken:
                command = [sys.executable, __file__, name, "--one", way]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                grown, time_of_step, told = json.loads(done.stdout.splitlines()[-1])
                taken[way].append(grown)
                seconds[way].append(time_of_step)
        told_plain, told_planned = (
            f"{nbytes / MB:.0f}" if SCRIPTS[name][1] else "" for nbytes in told
        )
        plain, planned = map(statistics.median, taken.values())
        slower = statistics.median(seconds["planned"]) / statistics.median(seconds["plain"])
        print(
            f"| {name} | {told_plain} | {plain:.0f} | {told_planned} | {planned:.0f} | "
            f"{planned / plain:.2f} | {slower:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
