"""Scheduled networks: they bind and step in the memory predicted, and statistics move once."""

from __future__ import annotations

import functools
from typing import Any, Callable

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.held import round_for_gpu
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import build_step, make_parts
from memonger.schedules.schedule import Schedule, Workload, plain
from memonger.schedules.training_step import OURS, arena

import networks
from drawn_schedules import everything, nested, work_of
from zoo import Recurrent, unrolled

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import MB, STEPS, Network, bound, empty, moves, run_steps, step

pytestmark = pytest.mark.gpu_dry_run


def dropped_out() -> Network:
    x = mx.sym.Variable("data")
    for k in range(6):
        x = mx.sym.FullyConnected(x, num_hidden=256, name=f"fc{k}")
        x = mx.sym.Dropout(mx.sym.Activation(x, act_type="relu"), p=0.3, name=f"drop{k}")
    x = mx.sym.FullyConnected(x, num_hidden=10, name="last")
    shapes = {"data": (1024, 256), "softmax_label": (1024,)}
    return mx.sym.SoftmaxOutput(x, name="softmax"), shapes


NETWORKS: dict[str, Callable[[], Network]] = {
    "ResNet": lambda: networks.resnet((2, 2, 2, 2)),
    "float16": lambda: networks.resnet((1, 1, 1, 1), image=128),
    "LSTM": lambda: networks.lstm(layers=2, steps=10, use_loss=False),
    "Dropout": dropped_out,
    "RNN": Recurrent("lstm", stacked=2, steps=20, batch=16, units=64, inputs=64).build,
    "R-CNN": lambda: networks.rcnn(regions=32),  # with an operator in NumPy
}


def expected_bytes(work: Workload, schedule: Schedule) -> tuple[int, int]:
    step, graph = build_step(make_parts(work, mkldnn=False), schedule), work.training.graph
    bound = [graph.tensors[i][0].nbytes for i in (*graph.arguments, *sorted(graph.auxiliary))]
    bound += [graph.tensors[a][0].nbytes for a in work.training.wanted]  # their gradients
    read = {*step.rows.read_row.tolist()}
    ours = (row for row in read if row >= 0 and step.ops[row] == "null")
    ours = (row for row in ours if step.names[row].startswith(OURS))
    bound += [step.signatures[row].tensors[0].nbytes for row in ours]
    replayed = arena(step)
    blocks = np.concatenate([replayed.allocated, np.array(bound, dtype=np.int64)])
    return replayed.pool_bytes, int(round_for_gpu(blocks).sum())


@pytest.mark.parametrize("name", NETWORKS)
def test_schedules_step_in_the_memory_predicted(gpu_dry_run: GpuDryRun, name: str) -> None:
    symbol, shapes = NETWORKS[name]()
    types = {"data": "float16"} if name == "float16" else None
    work = work_of(symbol, shapes, type_dict=types)
    schedules = {"plain": plain(work), "many levels": nested(work, 4, 1, 0.8)}
    if name == "RNN":
        schedules["everything"] = everything(work)
    symbols = {how: scheduled(symbol, schedule) for how, schedule in schedules.items()}
    nodes = work.training.graph.nodes
    norms = [x for x, node in enumerate(nodes) if node.op == "BatchNorm"]
    dropouts = [x for x, node in enumerate(nodes) if node.op == "Dropout"]
    ways = {"no plan": symbol, **symbols}
    watched = {"MEMONGER_WATCH": "1"}  # takes memory too; all values of the stand-ins are the same
    steps_of = run_steps(gpu_dry_run, ways, shapes, types=types, env=watched)
    for (how, fusion), taken in steps_of.items():
        moved = moves(taken.calls)
        means = [address for state, address in taken.states.items() if state.endswith("_mean")]
        # Those of the network once in each step; those of ours may move as they like.
        assert [moved.pop(mean) for mean in means] == [STEPS] * len(norms)
        times = np.ones(len(nodes), int)
        if how != "no plan":
            times = np.bincount(schedules[how].forwards, minlength=len(nodes))
            assert taken.fused == 0  # of whatever the user has set, which stays set
            pool, needed = expected_bytes(work, schedules[how])
            print(f"\n{how} {fusion}: {needed / MB:.1f} MB, {taken.trained / MB:.1f} seen", end="")
            assert taken.setting == fusion and taken.pool == pool // MB
            shared = 0 if name == "float16" else 10 * MB
            assert 0 <= taken.trained - needed < max(0.03 * needed, shared)
            # Inference, and training after it, in the same memory.
            assert max(taken.inferred, taken.in_all) - taken.trained < MB
        assert sum(moved.values()) == STEPS * sum(times[x] - 1 for x in norms)
        by_cudnn = STEPS * sum(times[x] == 1 for x in dropouts)
        assert taken.calls.count("cudnnDropoutForward") == by_cudnn
        assert how == "no plan" or taken.calls.count("cudnnDropoutBackward") == by_cudnn


def released(dry: DryRun, net: Any, shapes: Any, *, devices_mb: list[int]) -> None:
    """Emit what is held with a network that is bound and reshaped, and after it is gone."""

    def train() -> int:
        executor = bound(net, shapes, "0")
        seen: Any = mx.mon.Monitor(1, monitor_all=True)
        seen.install(executor)
        smaller = executor.reshape(**{name: (8, *shape[1:]) for name, shape in shapes.items()})
        for one in (executor, smaller):
            step(one)
            one.forward(is_train=False)
        mx.nd.waitall()
        return dry.used_bytes()

    for mb in devices_mb:
        dry.resize(mb)
        held = train()
        empty()
        dry.emit((held, dry.used_bytes()))


def test_memory_is_given_back(gpu_dry_run: GpuDryRun) -> None:
    """Of executors, reshaped ones, and what no monitor is told. Too small a device is no crash."""
    symbol, shapes = dropped_out()
    net = scheduled(symbol, everything(work_of(symbol, shapes)))
    # In turn: otherwise it depends on the moment whether a monitor's result finds a free block.
    in_turn = {"MXNET_ENGINE_TYPE": "NaiveEngine"}
    train = functools.partial(released, devices_mb=[2**17] * 3)
    _, second, third = gpu_dry_run.run(train, net, shapes, env=in_turn).emitted
    assert second == third and second[0] > second[1] + 8 * MB

    small = functools.partial(released, devices_mb=[12])
    result = gpu_dry_run.run(small, net, shapes, crashes=True)
    assert result.returncode == 1 and "out of memory" in result.message, result.message


def buckets(dry: DryRun, symbols: Any, batch: int, lengths: Any) -> list[int]:
    """Train a BucketingModule; return the memory held after each length, the longest first."""

    def network(length: int) -> Any:
        return symbols[length], ["data"], ["softmax_label"]

    module = mx.mod.BucketingModule(network, max(lengths), context=mx.gpu(0))
    held: list[int] = []
    for length in lengths:
        data = mx.nd.zeros((batch, length))
        described = [[(name, data.shape)] for name in ("data", "softmax_label")]
        if not held:
            module.bind(*described)
            module.init_params()
            module.init_optimizer(optimizer_params={"momentum": 0.0})
        descriptions = {"provide_data": described[0], "provide_label": described[1]}
        module.forward_backward(mx.io.DataBatch([data], [data], bucket_key=length, **descriptions))
        module.update()
        mx.nd.waitall()
        held.append(dry.used_bytes())
    return held


def test_buckets_share_the_memory_of_the_longest(gpu_dry_run: GpuDryRun) -> None:
    batch, lengths = 32, [24, 24, 20, 16, 12, 8, 24]
    nets, plans = {}, {}
    for length in set(lengths):
        nets[length] = unrolled(length, 256)
        work = work_of(nets[length], dict.fromkeys(("data", "softmax_label"), (batch, length)))
        plans[length] = scheduled(nets[length], nested(work, 4, 1, 0.8))
    planned, mixed, unplanned = (
        gpu_dry_run.run(buckets, symbols, batch, lengths).value
        for symbols in (plans, {**nets, 24: plans[24]}, nets)
    )
    assert planned[-1] / planned[1] < 1.15
    assert max(planned) < min(unplanned)
    # The others need what they need without a plan, beside the arena of the first.
    assert mixed[-1] < planned[0] + unplanned[-1]
