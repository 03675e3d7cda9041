"""Training steps of Gluon blocks: their CPU time, and the peak resident memory of a process.

    OMP_NUM_THREADS=1 python benchmarks/gluon.py              # all networks
    OMP_NUM_THREADS=1 python benchmarks/gluon.py chain --rounds 5

Each block is trained after ``hybridize()``, with ``static_alloc=True``, and by plans. Memory: each
way in processes of its own, MB (2**20 bytes) by which its resident memory grows from before the
first step to its peak; for marks also the same symbol under Module, with the same loss. Module is
bound for one row of the batch before, and for all of it in the first step, as a plan is: the bound
copy of the batch and the executor's graph count for both. It is the median of three processes,
which differ by some 3 MB.

Time: the ways take turns in one process, and the figure is the median of the ratios to the plain
step of the same round.

A last line tells what the stub costs: the CPU time of a call of the planned block, its loss and its
backward pass (marks), less that of the same symbol's executor with the same parameters, gradients
and loss, for one row of the batch, where little else is done. It counts our Python, MXNet's work
for the tape, and the zeros that the tape writes to all gradients. The copies of inputs and outputs
are those of one row. The share is of the plain step of the whole batch.
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
from typing import Any, Callable, Sequence

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
PROCESSES = 3  # whose median is told, for malloc's arenas differ from one to the next
TURNS = 20  # of calls for one row

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_alloc": {},
    "marks": {"how": "marks"},
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


class Ssd(gluon.HybridBlock):
    """SSD on MobileNet: for boxes of several sizes, scores of classes and positions."""

    def __init__(self, classes: int, per_pixel: int = 6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._classes = classes
        with self.name_scope():
            features = gluon.model_zoo.vision.mobilenet1_0(prefix="mobilenet_").features
            # What gives 1/16 of the image's size, and 1/32; the last two layers pool and flatten.
            self.scales = nn.HybridSequential()
            self.scales.add(features[:69], features[69:-2])
            for filters in (512, 512, 256, 256):
                smaller = nn.HybridSequential()
                for channels, kernel, stride, pad in ((filters // 2, 1, 1, 0), (filters, 3, 2, 1)):
                    smaller.add(nn.Conv2D(channels, kernel, stride, pad, use_bias=False))
                    smaller.add(nn.BatchNorm(), nn.Activation("relu"))
                self.scales.add(smaller)
            self.scores, self.boxes = nn.HybridSequential(), nn.HybridSequential()
            for _ in range(len(self.scales)):
                self.scores.add(nn.Conv2D(per_pixel * classes, 3, padding=1))
                self.boxes.add(nn.Conv2D(per_pixel * 4, 3, padding=1))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        scores, boxes = [], []
        for scale, score, box in zip(self.scales, self.scores, self.boxes):
            x = scale(x)
            scores.append(score(x).transpose((0, 2, 3, 1)).reshape((0, -1, self._classes)))
            boxes.append(box(x).transpose((0, 2, 3, 1)).reshape((0, -1, 4)))
        return F.concat(*scores, dim=1), F.concat(*boxes, dim=1)


def ssd() -> tuple[Any, tuple[int, ...]]:
    """SSD on MobileNet 1.0, 8 images."""
    return Ssd(10, prefix="net_"), (8, 3, 256, 256)


NETWORKS: dict[str, Callable[[], Any]] = {
    "chain": chain,
    "resnet50": resnet50,
    "transformer": transformer,
    "ssd": ssd,
}

CROSS_ENTROPY, HUBER = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.HuberLoss()


def loss_of(found: Any) -> Any:
    """Return a loss of scores, of ten classes each, and of boxes where there are any."""
    scores, *boxes = found if isinstance(found, (list, tuple)) else [found]
    wanted = np.arange(scores.size // 10).reshape(scores.shape[:-1]) % 10
    loss = CROSS_ENTROPY(scores, mx.nd.array(wanted))
    for each in boxes:
        loss = loss + HUBER(each, mx.nd.zeros_like(each))
    return loss


def made(name: str) -> tuple[Any, Any]:
    """Make a network with its parameters, and a batch for it."""
    net, shape = NETWORKS[name]()
    net.initialize()
    x = mx.nd.random.uniform(0, 10, shape)
    net(x[:1])
    return net, x


def plan_of(name: str, patience: float, **how: Any) -> memonger.Plan:
    """Plan a network by its first call."""
    net, x = made(name)
    memonger.gluon.plan(net, patience=patience, **how)
    with autograd.record():
        net(x)
    mx.nd.waitall()
    return memonger.gluon.plan_of(net)


def step_of(name: str, way: str, patience: float) -> Callable[[], None]:
    """Make what runs one training step to its end; its plan is searched for already."""
    net, x = made(name)
    if way in ("plain", "static_alloc"):
        net.hybridize(static_alloc=way == "static_alloc")
    else:
        plan = plan_of(name, patience, **WAYS[way])  # it is remembered for the first step
        if "Module" in way:
            return module_step(plan.symbol, x)
        memonger.gluon.plan(net, patience=patience, **WAYS[way])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})

    def step() -> None:
        with autograd.record():
            loss = loss_of(net(x))
        loss.backward()
        trainer.step(x.shape[0])
        mx.nd.waitall()

    return step


def module_step(symbol: Any, x: Any) -> Callable[[], None]:
    """Make what runs one training step of a symbol under Module."""
    module = mx.mod.Module(symbol, label_names=None)
    module.bind([("data", (1, *x.shape[1:]))])
    module.init_params()
    module.init_optimizer(optimizer_params={"learning_rate": 1e-4})
    batch = mx.io.DataBatch([x])

    def step() -> None:
        module.forward(batch, is_train=True)  # binds again for a batch of another size
        module.backward(gradients_of_loss(module.get_outputs()))
        module.update()
        mx.nd.waitall()

    return step


def gradients_of_loss(outputs: Sequence[Any]) -> list[Any]:
    """Compute the gradients of an executor's outputs."""
    found = [each.detach() for each in outputs]
    for each in found:
        each.attach_grad()
    with autograd.record():
        loss = loss_of(found)
    loss.backward()
    return [each.grad for each in found]


def stub_seconds(name: str, patience: float) -> float:
    """Measure the CPU seconds of a planned block's call beside those of its executor."""
    net, x = made(name)
    memonger.gluon.plan(net, patience=patience, how="marks")
    with autograd.record():
        net(x)
    symbol, row, known = memonger.gluon.plan_of(net).symbol, x[:1], net.collect_params()
    arrays = {each: known[each].data() if each in known else row for each in symbol.list_inputs()}
    gradients = {each: known[each].grad() for each in symbol.list_arguments() if each in known}
    aux = {each: arrays.pop(each) for each in symbol.list_auxiliary_states()}
    executor = symbol.bind(row.context, arrays, gradients, "write", aux)

    def planned() -> None:
        with autograd.record():
            loss = loss_of(net(row))
        loss.backward()
        mx.nd.waitall()

    def bare() -> None:
        executor.forward(is_train=True)
        executor.backward(gradients_of_loss(executor.outputs))
        mx.nd.waitall()

    seconds = in_turns({"planned": planned, "bare": bare}, TURNS, time.process_time)
    return float(np.median(seconds["planned"] - seconds["bare"]))


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


def peak(name: str, way: str, patience: float) -> float:
    """Return the median of what some processes grow by, in MB."""
    command = [sys.executable, __file__, "--grow", name, way, "--patience", str(patience)]
    told = [subprocess.run(command, stdout=subprocess.PIPE, check=True) for _ in range(PROCESSES)]
    return float(np.median([float(each.stdout.split()[-1]) for each in told]))


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
            line = f"{way:16}{peak(name, way, options.patience):8.0f}"
            if way in seconds:
                ratio = np.median(seconds[way] / seconds["plain"])
                line += f"{np.median(seconds[way]):14.2f}{ratio:10.2f}"
            print(line, flush=True)
        cost = stub_seconds(name, options.patience)
        share = cost / np.median(seconds["plain"])
        print(f"the stub: {1000 * cost:.1f} ms, {share:.1%} of a plain step", flush=True)


if __name__ == "__main__":
    main()
