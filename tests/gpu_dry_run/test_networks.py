"""Plans of whole networks, made on the CPU build: they bind and step in the memory predicted.

Nothing is computed in a dry run, so networks have their full size; ``-s`` shows the figures.
"""

from __future__ import annotations

import collections
import os
from typing import Any

import memonger
import mxnet as mx
import pytest
from memonger.costs.pool import pool
from memonger.schedules.training_step import arena
from memonger.costs.bind import read_planned_mb
from memonger.costs.held import round_for_gpu
from memonger.graph import marks
from memonger.graph.training import training_graph
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import build_step, make_parts
from memonger.solve.facts import find_wanted

import networks
from drawn_schedules import nested, work_of
from planned import as_module, forward, module_plan, nodes
from zoo import LARGE

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import MB, STEPS, Network, assert_moved_once, batch_norms, check_plans, check_told
from .steps import empty, fitting, plans, run_steps

pytestmark = pytest.mark.gpu_dry_run

FUSIONS = ("0", "1")


def check_device(dry_run: GpuDryRun, net: Network, plan: Any) -> None:
    """Check that the plan steps on the MB predicted, to 3 %, on which no plan does not."""
    predicted = plan.device_bytes / MB
    runs = [[(plan.symbol, f, predicted * by) for by in (1.03, 1 / 1.03)] for f in FUSIONS]
    for ways in (*runs, [(net[0], "0", predicted * 1.03)]):
        # The last runs out of memory. A bind that fails keeps its memory, so that it must be last.
        result = dry_run.run(fitting, ways, net[1], crashes=True)
        assert len(result.emitted) == len(ways) - 1 and "out of memory" in result.stderr


@pytest.mark.parametrize("name", ["resnet-3-4-6-3", "densenet121", "unet", "lstm", "highway"])
def test_plans_step_in_the_memory_predicted(gpu_dry_run: GpuDryRun, name: str) -> None:
    hows = {how: {"planner": how} for how in ("smallest", "chen2016")}
    plans_of, steps_of = check_plans(gpu_dry_run, LARGE[name](), hows, FUSIONS)
    for (how, fusion), taken in steps_of.items():
        assert_moved_once(plans_of[how].symbol, taken.calls)
        assert bool(plans_of[how].recomputed) == (how != "no plan")
        # Arrays that operators share for their own use are not in the prediction.
        assert fusion == "1" or taken.peak >= plans_of[how].device_bytes
    # With fusion the saving is still there.
    saved = [steps_of["no plan", f].pool - steps_of["smallest", f].pool for f in FUSIONS]
    assert saved[0] > 0 and saved[1] > 0.8 * saved[0]
    assert steps_of["smallest", "1"].peak < plans_of["smallest"].device_bytes / 0.85


@pytest.mark.parametrize("manager", ["Naive", "Round"])
def test_blocks_in_float16_are_rounded_as_each_storage_manager_does(
    gpu_dry_run: GpuDryRun, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet's storage managers round them differently. BatchNorms run cuDNN's way and ours."""
    monkeypatch.setenv("MXNET_GPU_MEM_POOL_TYPE", manager)
    symbol, shapes = networks.resnet((2, 2, 2, 2), image=128)
    types = {"data": "float16"}
    late = [node["name"] for node in nodes(symbol) if node["op"] == "BatchNorm"][-4]  # cuDNN's then
    plan = module_plan(symbol, shapes, type_dict=types, until=late)
    norms, own = batch_norms(plan.symbol)
    assert 0 < own <= norms - 4
    assert plan.exact and 0.5 <= plan.pool_bytes / plan.counted_bytes < 0.6  # some are float32
    env = {"MXNET_GPU_MEM_POOL_TYPE": manager}
    (taken,) = run_steps(gpu_dry_run, {"it": plan.symbol}, shapes, ("0",), types, env=env).values()
    assert_moved_once(plan.symbol, taken.calls)
    more = (0.2 if manager == "Round" else 0.1) * MB  # it rounds what operators share up as well
    assert 0 <= taken.peak - plan.device_bytes < more
    graph = forward(plan.symbol, shapes, types)
    training = training_graph(graph, find_wanted(graph, as_module(symbol, shapes)))
    blocks = pool(training, marks.read_mask(graph)).allocated
    assert blocks.sum() == plan.pool_bytes
    allocations = [int(line.split()[1]) for line in taken.calls if line.startswith("cudaMalloc ")]
    asked_for, expected = (
        collections.Counter(allocations),
        collections.Counter(round_for_gpu(blocks).tolist()),
    )
    assert not expected - asked_for
    others = asked_for - expected  # what operators share for their own use
    assert sum(size * count for size, count in others.items()) < more


# -- plans for a GPU alone --------------------------------------------------------------------


def planned(dry_run: GpuDryRun, net: Network, *settings: tuple[str, dict[str, Any]]) -> Any:
    """Plans with ``ctx=mx.gpu(0)``, made on a device that is too small to train on."""
    return dry_run.run(plans, *net, settings, env={"CUDASTUB_MEM_MB": "1"})


def test_plans_for_a_gpu_take_what_is_told_with_and_without_fusion(gpu_dry_run: GpuDryRun) -> None:
    """Fusion leaves their copies; those of a plan for any device are fused, and it needs more."""
    net = symbol, shapes = LARGE["highway"]()
    (plan,) = planned(gpu_dry_run, net, ("1", {"patience": 0.02})).emitted
    anywhere = module_plan(*net)
    assert memonger.unplan(plan.symbol).tojson() == symbol.tojson()
    assert plan.counted_bytes < 1.1 * anywhere.counted_bytes
    symbols = {"gpu": plan.symbol, "any": anywhere.symbol, "no plan": symbol}
    steps_of = run_steps(gpu_dry_run, symbols, shapes)
    check_told(steps_of, {"gpu": plan}, "1")
    check_told(steps_of, {"any": anywhere}, "0")
    check_device(gpu_dry_run, net, plan)
    assert steps_of["no plan", "0"].pool != steps_of["no plan", "1"].pool


def wavenet() -> Network:
    """Build gated convolutions whose results are added up: a fused sum holds all its terms."""
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


def test_what_fusion_takes_is_told_by_a_bind_on_a_gpu(
    gpu_dry_run: GpuDryRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where none is at hand, a warning says that fusion is not counted."""
    net = symbol, shapes = wavenet()
    options = {"patience": 0.05}
    fused, unfused = planned(gpu_dry_run, net, ("1", options), ("0", options)).emitted
    steps_of = run_steps(gpu_dry_run, {"fused": fused.symbol, "unfused": unfused.symbol}, shapes)
    check_told(steps_of, {"fused": fused}, "1")
    check_told(steps_of, {"unfused": unfused}, "0")
    monkeypatch.setenv("MXNET_USE_FUSION", "1")
    elsewhere = module_plan(symbol, shapes, ctx="gpu", **options)
    assert elsewhere.symbol.tojson() == fused.symbol.tojson() and elsewhere.exact
    said = [record.message for record in caplog.records if "pointwise fusion" in record.message]
    assert len(said) == 1 and all(
        remedy in said[0] for remedy in ("mx.gpu(0)", "MXNET_USE_FUSION=0", "how='schedule'")
    )
    # The sum holds all its terms.
    assert not fused.exact and fused.counted_bytes > 1.2 * elsewhere.counted_bytes


def test_a_leaky_relu_that_fusion_cannot_read(gpu_dry_run: GpuDryRun) -> None:
    """MXNet's own message is ``_Map_base::at``."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
    net = mx.sym.MakeLoss(mx.sym.LeakyReLU(x, name="leaky") * 2)
    ways = [(fusion, {"patience": 0.02}) for fusion in ("0", "1")]
    result = gpu_dry_run.run(plans, net, {"data": (4, 4)}, ways, crashes=True)
    assert len(result.emitted) == 1
    assert "'leaky'" in result.message and "act_type" in result.message
    assert "MXNET_USE_FUSION=0" in result.message and "_Map_base" not in result.message


# -- Module on two devices --------------------------------------------------------------------


def fit(dry: DryRun, ways: Any, shapes: Any) -> None:
    """Call Module.fit on two GPUs of so many MB, then another batch size, score and predict."""
    for name, symbol, fusion, mb in ways:
        os.environ["MXNET_USE_FUSION"] = fusion
        dry.resize(mb)
        dry.reset_peak()
        images, labels = (mx.nd.zeros(shapes[n]) for n in ("data", "softmax_label"))
        data = mx.io.NDArrayIter(images, labels, batch_size=len(images))
        module = mx.mod.Module(symbol, context=[mx.gpu(0), mx.gpu(1)])
        module.fit(
            mx.io.ResizeIter(data, STEPS),
            num_epoch=1,
            kvstore="device",
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            batch_end_callback=lambda _: mx.nd.waitall(),
        )
        mx.nd.waitall()
        pools = [read_planned_mb(executor) for executor in module._exec_group.execs]
        peaks = [dry.peak_bytes(k) for k in range(2)]
        half = len(images) // 2  # the last, partial batch of an epoch
        for batch in mx.io.NDArrayIter(images[:half], labels[:half], batch_size=half):
            module.forward_backward(batch)
            module.update()
        module.score(data, "acc")
        module.predict(data)
        mx.nd.waitall()
        dry.emit((name, pools, peaks, [dry.peak_bytes(k) for k in range(2)]))
        del module
        empty(2)


def test_a_plan_trains_on_two_devices_that_are_too_small_without(gpu_dry_run: GpuDryRun) -> None:
    """With a plan it fits, partial batch, score and predict included, where it does not without."""
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=32, image=128, filters=32)
    plan = module_plan(symbol, shapes, devices=2)
    work = work_of(symbol, {name: (shape[0] // 2, *shape[1:]) for name, shape in shapes.items()})
    schedule = nested(work, 4, 1, 0.9)
    symbols = {"no plan": symbol, "marks": plan.symbol, "schedule": scheduled(symbol, schedule)}
    expected = {
        "no plan": plan.candidates["no plan"],
        "marks": plan.counted_bytes,
        "schedule": arena(build_step(make_parts(work, mkldnn=False), schedule)).pool_bytes,
    }
    ways = [(name, net, "0", 2**17) for name, net in symbols.items()]
    env = {"CUDASTUB_DEVICES": "2"}
    least, most = [], []  # bytes without a plan, and with one
    for name, pools, peaks, later in gpu_dry_run.run(fit, ways, shapes, env=env).emitted:
        assert all(more <= 1.05 * peak for peak, more in zip(peaks, later))
        assert pools == [expected[name] // MB] * 2
        if name == "no plan":
            least.append(min(peaks))
        else:
            most.append(max(later))
    small = max(most) // MB + 10
    assert small < min(least) // MB
    gpu_dry_run.run(fit, [(*way[:3], small) for way in ways[1:]], shapes, env=env)
    # Without a plan both devices run out of memory, and their workers note what they throw without
    # a lock (AddToGlobalExceptions in src/engine/threaded_engine.h), so that the process may crash
    # before it can tell. MXNet's engine for debugging has no workers.
    env["MXNET_ENGINE_TYPE"] = "NaiveEngine"
    result = gpu_dry_run.run(fit, [(*ways[0][:3], small)], shapes, env=env, crashes=True)
    assert "out of memory" in result.stderr, result.stderr
