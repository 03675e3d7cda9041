"""Plans of whole networks on MXNet's GPU build: they bind, step, and take the memory predicted.

Plans are made on the CPU build, as a user makes them, and carried out on stand-ins for CUDA (see
the package's docstring). Nothing is computed there, so networks have their full size. Run with
``-s`` to see the figures.
"""

from __future__ import annotations

import collections
import math
from typing import Any, Callable, Dict, Tuple

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.replay import replay
from memonger.graph import marks
from memonger.graph.training import training_graph
from memonger.schedules.execution.arrays import address
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import parts, unroll
from memonger.solve.memory import wanted

import networks
from drawn_schedules import nested, work_of
from planned import as_module, forward, module_plan, nodes

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import MB, STEPS, moves, planned_for_gpu, pool_mb, run_steps, steps

pytestmark = pytest.mark.gpu_dry_run

Network = Tuple[Any, Dict[str, Any]]
NETWORKS: dict[str, Callable[[], Network]] = {
    "example_resnet": lambda: networks.resnet((3, 4, 6, 3)),
    "ResNet-50 v1": lambda: networks.model_zoo("resnet50_v1"),
    "ResNet-50 v2": networks.resnet_v2,
    "DenseNet-121": lambda: networks.model_zoo("densenet121"),
    "Inception-v3": networks.inception_v3,
    "MobileNetV2": networks.mobilenet_v2,
    "U-Net": networks.unet,
    "LSTM": lambda: networks.lstm(layers=2, steps=40, use_loss=False),
    "transformer": lambda: networks.transformer(layers=6),
    "highway": networks.highway,
    "normalised input": networks.normalised_input,
}


# -- binding and stepping ---------------------------------------------------------------------


def batch_norms(symbol: Any) -> tuple[int, int]:
    """How many BatchNorm a symbol has, and how many of them run MXNet's own kernel."""
    found = [n.get("attrs", {}) for n in nodes(symbol) if n["op"] == "BatchNorm"]
    return len(found), sum(a.get("cudnn_off") == "True" for a in found)


def assert_moved_once(symbol: Any, calls: list[str], devices: int = 1) -> None:
    """Each BatchNorm's statistics moved once in each step."""
    norms, own = batch_norms(symbol)
    expected = [STEPS] * devices * (norms - own) + [devices * STEPS * own] * (own > 0)
    assert sorted(moves(calls).values()) == sorted(expected)


def check_network(dry_run: GpuDryRun, build: Callable[[], Network]) -> memonger.Plan:
    """Step the network, its smallest plan, which is returned, and the original's."""
    symbol, shapes = build()
    plans = {
        planner: module_plan(symbol, shapes, planner=planner)
        for planner in ("smallest", "chen2016")
    }
    symbols = {"unplanned": symbol, **{name: plan.symbol for name, plan in plans.items()}}
    found = run_steps(dry_run, symbols, shapes)
    for (name, _), taken in found.items():
        assert_moved_once(symbols[name], taken.calls)
    pool = {way: taken.pool for way, taken in found.items()}
    for name, plan in plans.items():
        taken = found[name, "0"]
        print(f"\n{name:9} pool {pool[name, '0']} MB, {pool[name, '1']} fused", end=", ")
        print(f"device {plan.device_bytes / MB:.1f} predicted, {taken.peak / MB:.1f} seen", end="")
        assert plan.exact and plan.recomputed
        assert taken.pool == plan.counted_bytes // MB
        assert pool["unplanned", "0"] == plan.candidates["no plan"] // MB
        # Arrays that operators share for their own use are not in the prediction.
        assert 0 <= taken.peak - plan.device_bytes < 0.03 * plan.device_bytes
    # With fusion the saving is still there.
    saved = [pool["unplanned", fusion] - pool["smallest", fusion] for fusion in ("0", "1")]
    assert saved[0] > 0 and saved[1] > 0.8 * saved[0]
    return plans["smallest"]


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_step_in_the_memory_predicted(gpu_dry_run: GpuDryRun, name: str) -> None:
    check_network(gpu_dry_run, NETWORKS[name])


@pytest.mark.slow
def test_the_whole_example(gpu_dry_run: GpuDryRun) -> None:
    """The original's own example, about 200 BatchNorm deep: 14332 MB without a plan."""
    check_network(gpu_dry_run, networks.resnet)


def fits(dry_run: GpuDryRun, symbol: Any, shapes: Any, mb: float, fusion: str = "0") -> bool:
    """Whether a network steps on a device of so many MB; if not, for want of memory."""
    ways = [("it", symbol, fusion)]
    result = dry_run.run(steps, ways, shapes, None, False, memory_mb=int(mb))
    assert result.ok or "out of memory" in result.message, result.message
    return result.ok


def check_device(
    dry_run: GpuDryRun, network: Network, plan: Any, fusions: tuple[str, ...] = ("0",)
) -> None:
    """The least MB on which the plan steps are those predicted, to 3 %; without one it does not."""
    (symbol, shapes), predicted = network, plan.device_bytes / MB
    for fusion in fusions:
        assert fits(dry_run, plan.symbol, shapes, 1.03 * predicted, fusion)
        assert not fits(dry_run, plan.symbol, shapes, math.ceil(predicted / 1.03) - 1, fusion)
    assert not fits(dry_run, symbol, shapes, 1.03 * predicted)


@pytest.mark.parametrize("name", ["example_resnet", "U-Net"])
def test_device_bytes_suffice(gpu_dry_run: GpuDryRun, name: str) -> None:
    network = NETWORKS[name]()
    check_device(gpu_dry_run, network, module_plan(*network))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_searched_plans_step_in_the_memory_predicted(gpu_dry_run: GpuDryRun, name: str) -> None:
    """With the whole search, and on the smallest device."""
    plan, network = check_network(gpu_dry_run, NETWORKS[name]), NETWORKS[name]()
    check_device(gpu_dry_run, network, plan)
    assert fits(gpu_dry_run, plan.symbol, network[1], plan.device_bytes / MB / 0.85, "1")


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_smallest_device_for_a_plan_for_a_gpu(gpu_dry_run: GpuDryRun, name: str) -> None:
    network = NETWORKS[name]()
    (plan,) = planned_for_gpu(gpu_dry_run, *network, ("1", {}))
    check_device(gpu_dry_run, network, plan, ("0", "1"))


def test_statistics_would_move_twice(gpu_dry_run: GpuDryRun) -> None:
    """If recomputed BatchNorm were left to cuDNN: those of a chain, whose copies are all read."""
    symbol, shapes = networks.normalised_input(batch=2, image=64)
    plan = memonger.plan(symbol, shapes, planner="chen2016")
    norms, own = batch_norms(plan.symbol)
    assert norms == own == 4
    forced = [n.get("attrs", {}).get(marks.FORCE) == "True" for n in nodes(plan.symbol)]
    symbols = {"ours": plan.symbol, "cudnn": marks.apply(symbol, np.array(forced))}
    found = run_steps(gpu_dry_run, symbols, shapes, ("0",))
    assert moves(found["ours", "0"].calls) == {"own": STEPS * norms}
    assert list(moves(found["cudnn", "0"].calls).values()) == [2 * STEPS] * norms


@pytest.mark.parametrize("pool", ["Naive", "Round", "Unpooled"])
def test_storage_managers(
    gpu_dry_run: GpuDryRun, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet has three, which round differently."""
    monkeypatch.setenv("MXNET_GPU_MEM_POOL_TYPE", pool)
    symbol, shapes = networks.resnet_v2((1, 1, 1, 1), batch=3, image=100)
    plan, env = module_plan(symbol, shapes), {"MXNET_GPU_MEM_POOL_TYPE": pool}
    found = run_steps(gpu_dry_run, {"it": plan.symbol}, shapes, ("0",), env=env)
    assert 0 <= found["it", "0"].peak - plan.device_bytes < 0.1 * MB


def test_float16(gpu_dry_run: GpuDryRun) -> None:
    """Blocks of the pool are asked for with the real size of elements, in cuDNN's way and ours."""
    symbol, shapes = networks.resnet((2, 2, 2, 2), image=128)
    types = {"data": "float16"}
    late = [node["name"] for node in nodes(symbol) if node["op"] == "BatchNorm"][-4]  # cuDNN's then
    plan = module_plan(symbol, shapes, type_dict=types, until=late)
    norms, own = batch_norms(plan.symbol)
    assert 0 < own <= norms - 4
    assert plan.exact and 0.5 <= plan.pool_bytes / plan.counted_bytes < 0.6  # some are float32
    env = {"MXNET_GPU_MEM_POOL_TYPE": "Unpooled"}  # nothing is rounded
    found = run_steps(gpu_dry_run, {"it": plan.symbol}, shapes, ("0",), types, env=env)
    calls = found["it", "0"].calls
    assert_moved_once(plan.symbol, calls)
    graph = forward(plan.symbol, shapes, types)
    training = training_graph(graph, wanted(graph, as_module(symbol, shapes)))
    blocks = replay(training, marks.recomputed(graph)).block_bytes()
    assert blocks.sum() == plan.pool_bytes
    asked = [int(line.split()[1]) for line in calls if line.startswith("cudaMalloc ")]
    asked_for, expected = collections.Counter(asked), collections.Counter(blocks.tolist())
    assert not expected - asked_for
    others = asked_for - expected  # what operators share for their own use
    assert sum(size * count for size, count in others.items()) < 0.1 * MB


# -- plans for a GPU alone --------------------------------------------------------------------


def test_fusion_leaves_the_copies_of_a_plan_for_a_gpu_alone(gpu_dry_run: GpuDryRun) -> None:
    """A plan for any device needs more with fusion: its copies are fused."""
    symbol, shapes = NETWORKS["ResNet-50 v1"]()
    (planned,) = planned_for_gpu(gpu_dry_run, symbol, shapes, ("1", {"patience": 0.02}))
    assert planned.exact
    assert memonger.unplan(planned.symbol).tojson() == symbol.tojson()
    anywhere = module_plan(symbol, shapes)
    found = run_steps(gpu_dry_run, {"gpu": planned.symbol, "any": anywhere.symbol}, shapes)
    for fusion in ("0", "1"):
        taken = found["gpu", fusion]
        assert taken.pool == planned.counted_bytes // MB
        assert 0 <= taken.peak - planned.device_bytes < 0.03 * planned.device_bytes
    assert found["any", "0"].pool == anywhere.counted_bytes // MB
    assert found["any", "1"].peak > 1.03 * anywhere.device_bytes


def test_a_plan_for_a_gpu_where_fusion_changes_the_unplanned(gpu_dry_run: GpuDryRun) -> None:
    """Cuts are searched all the same."""
    symbol, shapes = networks.highway()
    (planned,) = planned_for_gpu(gpu_dry_run, symbol, shapes, ("1", {"patience": 0.02}))
    found = run_steps(gpu_dry_run, {"unplanned": symbol}, shapes)
    assert found["unplanned", "0"].pool != found["unplanned", "1"].pool
    assert planned.exact and planned.counted_bytes < 1.1 * module_plan(symbol, shapes).counted_bytes


def wavenet() -> Network:
    """Gated convolutions whose results are added up: a sum that is fused holds all its terms."""
    S, length = mx.sym, 2048
    x = S.Convolution(S.Variable("data"), num_filter=32, kernel=(1,), name="first")
    total = None
    for i in range(8):
        y = S.expand_dims(x, axis=2)
        y = S.Convolution(y, num_filter=64, kernel=(1, 2), dilate=(1, 2**i), pad=(0, 2**i))
        y = S.slice_axis(S.squeeze(y, axis=2), axis=2, begin=0, end=length)
        one, other = S.SliceChannel(y, num_outputs=2, axis=1)
        z = S.tanh(one) * S.sigmoid(other)
        skip = S.Convolution(z, num_filter=32, kernel=(1,))
        total = skip if total is None else total + skip
        x = x + S.Convolution(z, num_filter=32, kernel=(1,))
    y = S.Convolution(S.relu(total), num_filter=64, kernel=(1,))
    net = S.SoftmaxOutput(y, multi_output=True, name="softmax")
    return net, {"data": (16, 1, length), "softmax_label": (16, length)}


FUSED = {"wavenet": wavenet, "U-Net": lambda: networks.unet(8, 112, 16, depth=3)}


@pytest.mark.parametrize("name", FUSED)
def test_device_bytes_with_fusion_and_without(gpu_dry_run: GpuDryRun, name: str) -> None:
    """To 3 % of what is asked of the device; where fusion takes more memory, that is said."""
    symbol, shapes = FUSED[name]()
    ways = (("1", True), ("1", False), ("0", True))
    settings = [(fusion, {"patience": 0.02, "kept_copies": copies}) for fusion, copies in ways]
    made = planned_for_gpu(gpu_dry_run, symbol, shapes, *settings)
    for k, ((fusion, _), plan) in enumerate(zip(settings, made)):
        (taken,) = run_steps(gpu_dry_run, {"it": plan.symbol}, shapes, (fusion,)).values()
        assert plan.exact and plan.counted_bytes // MB == taken.pool
        assert abs(plan.device_bytes - taken.peak) < 0.03 * taken.peak
        costs = [text for text in plan.said if "pointwise fusion" in text]
        if (k, name) != (0, "wavenet"):  # a little more than without fusion
            assert len(costs) == ((k, name) == (1, "wavenet"))
        for text in costs:
            assert "MXNET_USE_FUSION=0" in text and "how='schedule'" in text
            assert f"with it {plan.counted_bytes / MB:.1f} MB" in text
    if name == "wavenet":
        fused, without_copies, unfused = (plan.counted_bytes for plan in made)
        assert unfused < 0.8 * without_copies  # the sum holds all its terms
        assert fused < 1.1 * unfused  # but where it is kept apart from fusion


def test_a_leaky_relu_that_fusion_cannot_read(gpu_dry_run: GpuDryRun) -> None:
    """MXNet's own message is ``_Map_base::at``."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
    net = mx.sym.MakeLoss(mx.sym.LeakyReLU(x, name="leaky") * 2)
    settings = [(fusion, {"patience": 0.02}) for fusion in ("1", "0")]
    fused, plain = planned_for_gpu(gpu_dry_run, net, {"data": (4, 4)}, *settings)
    assert "'leaky'" in fused.error and "act_type" in fused.error
    assert "MXNET_USE_FUSION=0" in fused.error and "_Map_base" not in fused.error
    assert plain.error == ""


# -- Module on two devices --------------------------------------------------------------------


def fit(dry: DryRun, symbol: Any, shapes: Any) -> Any:
    """Module.fit on two GPUs, with another batch size, then score; what each GPU held at most."""
    arrays = {name: mx.nd.zeros(shape) for name, shape in shapes.items()}
    labels = {name: arrays.pop(name) for name in list(arrays) if name.endswith("label")}
    size = len(next(iter(arrays.values())))
    data = mx.io.NDArrayIter(arrays, labels, batch_size=size)
    module = mx.mod.Module(symbol, context=[mx.gpu(0), mx.gpu(1)])
    module.bind(data.provide_data, data.provide_label)
    dry.note("run")
    module.fit(
        mx.io.ResizeIter(data, STEPS),
        num_epoch=1,
        kvstore="device",
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        batch_end_callback=lambda _: mx.nd.waitall(),
    )
    mx.nd.waitall()
    dry.note("ran")
    executors = module._exec_group.execs
    means = [a for e in executors for name, a in e.aux_dict.items() if name.endswith("_mean")]
    found = [[pool_mb(e) for e in executors], [f"0x{address(mean):x}" for mean in means]]
    peaks = [dry.peak_bytes(k) for k in range(2)]
    smaller = mx.io.NDArrayIter(
        {name: array[: size // 2] for name, array in arrays.items()},
        {name: array[: size // 2] for name, array in labels.items()},
        batch_size=size // 2,
    )
    for batch in smaller:  # the last, partial batch of an epoch
        module.forward_backward(batch)
        module.update()
    module.score(data, "acc")
    module.predict(data)
    mx.nd.waitall()
    return [*found, peaks, [dry.peak_bytes(k) for k in range(2)]]


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_fit_on_two_devices(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    """With a plan it fits, partial batch, score and predict included, where it does not without."""
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=32, image=128, filters=32)
    plan = module_plan(symbol, shapes, devices=2)
    work = work_of(symbol, {name: (shape[0] // 2, *shape[1:]) for name, shape in shapes.items()})
    schedule = nested(work, 4, 1, 0.9)
    step = unroll(parts(work, mkldnn=False), schedule)
    ways = {
        "unplanned": (symbol, plan.candidates["no plan"]),
        "marks": (plan.symbol, plan.counted_bytes),
        "schedule": (scheduled(symbol, schedule), step.replay().pool_bytes),
    }
    env = {"MXNET_USE_FUSION": fusion}
    most = {}
    for name, (net, pool_bytes) in ways.items():
        result = gpu_dry_run.run(fit, net, shapes, devices=2, env=env, trace=True)
        assert result.ok, result.message
        pools, means, most[name], later = result.value
        assert all(more <= 1.05 * peak for peak, more in zip(most[name], later))
        calls = result.trace[result.trace.index("run") : result.trace.index("ran")]
        if name == "schedule":
            moved = moves(calls)
            assert means and [moved[mean] for mean in means] == [STEPS] * len(means)
        else:
            assert_moved_once(net, calls, devices=2)
        if name == "schedule" or fusion == "0":
            assert pools == [pool_bytes // MB] * 2
        if name != "unplanned":
            between = max(later) // MB + 10
            assert between < min(most["unplanned"]) // MB
            result = gpu_dry_run.run(fit, net, shapes, devices=2, memory_mb=between, env=env)
            assert result.ok, (name, result.message)
    # Without a plan both devices run out of memory, and their workers note what they throw without
    # a lock (AddToGlobalExceptions in src/engine/threaded_engine.h), so that the process may crash
    # before it can tell. MXNet's engine for debugging has no workers.
    env["MXNET_ENGINE_TYPE"] = "NaiveEngine"
    result = gpu_dry_run.run(fit, symbol, shapes, devices=2, memory_mb=between, env=env)
    assert not result.ok and "out of memory" in result.message, result.message
