"""Plans of whole networks on MXNet's GPU build: they bind, step, and take the memory predicted.

Plans are made on the CPU build, as a user makes them, and carried out on stand-ins for CUDA (see
the package's docstring). Nothing is computed there, so networks have their full size. Run with
``-s`` to see the figures.
"""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Tuple

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.graph import marks
from memonger.costs.replay import replay
from memonger.graph.read import forward_graph
from memonger.graph.inputs import read_shapes
from memonger.solve.memory import wanted
from memonger.graph.training import training_graph

import networks
from planned import nodes

from .child import DryRun
from .dry_run import GpuDryRun, Result

pytestmark = pytest.mark.gpu_dry_run

MB = 2**20
LARGE = 2**17  # MB of a device on which everything fits
TESTS = Path(__file__).resolve().parents[1]
PATHS = [str(TESTS / "helpers"), str(TESTS.parent / "examples")]
STEPS = 2

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


def as_module(symbol: Any, shapes: Any) -> dict[str, str]:
    """The gradients that Module asks for."""
    return {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}


# -- binding and stepping ---------------------------------------------------------------------


def steps(dry: DryRun) -> Any:
    """Bind and step each symbol with each setting of fusion; emits what it takes."""
    import gc
    import os
    import re

    import mxnet as mx

    symbols, shapes, requests, fusions, count = dry.args[:5]
    types = dry.args[5] if len(dry.args) > 5 else None
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    for name, text in symbols.items():
        for fusion in fusions:
            os.environ["MXNET_USE_FUSION"] = fusion  # read at each bind
            dry.note(f"bind {name} {fusion}")
            dry.reset_peak()
            executor = mx.sym.load_json(text).simple_bind(
                mx.gpu(0), grad_req=requests, type_dict=types, **shapes
            )
            mx.nd.waitall()
            dry.note(f"run {name} {fusion}")
            for _ in range(count):
                executor.forward(is_train=True)
                executor.backward()
                mx.nd.waitall()
            (pool,) = re.findall(r"Total (\d+) MB allocated", executor.debug_str()[-200:])
            dry.emit([name, fusion, int(pool), dry.peak_bytes()])
            del executor
            gc.collect()
            mx.nd.waitall()
            mx.gpu(0).empty_cache()
    return "done"


def run_steps(
    dry_run: GpuDryRun,
    symbols: dict[str, Any],
    shapes: dict[str, Any],
    fusions: tuple[str, ...] = ("0", "1"),
    types: Any = None,
    count: int = STEPS,
    **options: Any,
) -> Result:
    """``steps`` of some symbols with the same inputs."""
    some = next(iter(symbols.values()))
    texts = {name: symbol.tojson(remove_amp_cast=False) for name, symbol in symbols.items()}
    args = [texts, shapes, as_module(some, shapes), fusions, count, types]
    return dry_run.run(steps, args=args, **options)


def marked_nodes(symbol: Any) -> np.ndarray:
    """The nodes that carry ``force_mirroring``."""
    return np.array([n.get("attrs", {}).get(marks.FORCE) == "True" for n in nodes(symbol)])


def batch_norms(symbol: Any) -> tuple[int, int]:
    """How many BatchNorm a symbol has, and how many of them run MXNet's own kernel."""
    found = [n.get("attrs", {}) for n in nodes(symbol) if n["op"] == "BatchNorm"]
    return len(found), sum(a.get("cudnn_off") == "True" for a in found)


def moves(trace: list[str], name: str, fusion: str) -> dict[str, int]:
    """How often running statistics moved in the steps of a symbol.

    cuDNN's kernel moves them in the forward pass, and the trace has the address of each mean;
    MXNet's own does in the backward pass: those calls are counted together, under 'own'.
    """
    start = trace.index(f"run {name} {fusion}") + 1
    found: dict[str, int] = collections.Counter()
    for line in trace[start:]:
        if line.startswith("bind "):
            break
        if line.startswith("cudnnBatchNormalizationForwardTraining"):
            fields = dict(part.split("=") for part in line.split()[1:])
            if float(fields["factor"]):
                found[fields["mean"]] += 1
        elif "BatchNormalizationBackwardKernel" in line:
            found["own"] += 1
    return found


def expected_moves(symbol: Any) -> list[int]:
    """What ``moves`` counts if each BatchNorm's statistics move once in each step."""
    norms, own = batch_norms(symbol)
    return sorted([STEPS] * (norms - own) + [STEPS * own] * (own > 0))


def table_row(name: str, plans: dict[str, Any], emitted: list[Any]) -> str:
    """Pool MB as predicted and as seen with fusion off and on, the ratios, device MB."""
    seen = {(symbol, fusion): (pool, peak) for symbol, fusion, pool, peak in emitted[:-1]}
    lines = []
    for planner, plan in plans.items():
        (off, peak), (on, peak_on) = seen[planner, "0"], seen[planner, "1"]
        lines.append(
            "%-17s %-9s pool %d predicted, %d seen, %d fused; of the unplanned %.3f, fused %.3f; "
            "device %.1f predicted, %.1f seen, %.1f fused"
            % (
                name,
                planner,
                plan.counted_bytes // MB,
                off,
                on,
                off / seen["unplanned", "0"][0],
                on / seen["unplanned", "1"][0],
                plan.device_bytes / MB,
                peak / MB,
                peak_on / MB,
            )
        )
    return "\n".join(lines)


def check_network(gpu_dry_run: GpuDryRun, name: str, build: Callable[[], Network]) -> memonger.Plan:
    """Step the network, its smallest plan, which is returned, and the original's."""
    symbol, shapes = build()
    plans = {
        planner: memonger.plan(symbol, shapes, planner=planner, grad_req=as_module(symbol, shapes))
        for planner in ("smallest", "chen2016")
    }
    assert all(plan.exact and plan.recomputed for plan in plans.values())
    symbols = {"unplanned": symbol, **{name: plan.symbol for name, plan in plans.items()}}
    result = run_steps(gpu_dry_run, symbols, shapes, trace=True, memory_mb=LARGE)
    assert result.ok, (result.message, result.emitted)
    pools = {(symbol, fusion): pool for symbol, fusion, pool, _ in result.emitted[:-1]}
    peaks = {(symbol, fusion): peak for symbol, fusion, _, peak in result.emitted[:-1]}
    for planner, plan in plans.items():
        assert pools[planner, "0"] == plan.counted_bytes // MB
        # Arrays that operators share for their own use are not in the prediction.
        assert 0 <= peaks[planner, "0"] - plan.device_bytes < 0.03 * plan.device_bytes
        assert pools["unplanned", "0"] == plan.candidates["no plan"] // MB
    # With fusion the saving is still there.
    for fusion in ("0", "1"):
        assert pools["smallest", fusion] < pools["unplanned", fusion]
    saved = [pools["unplanned", f] - pools["smallest", f] for f in ("0", "1")]
    assert saved[1] > 0.8 * saved[0]
    for kind, planned in symbols.items():
        for fusion in ("0", "1"):
            moved = moves(result.trace, kind, fusion)
            assert sorted(moved.values()) == expected_moves(planned), (kind, fusion)
    print("\n" + table_row(name, plans, result.emitted))
    return plans["smallest"]


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_step_in_the_memory_predicted(gpu_dry_run: GpuDryRun, name: str) -> None:
    check_network(gpu_dry_run, name, NETWORKS[name])


@pytest.mark.slow
def test_the_whole_example(gpu_dry_run: GpuDryRun) -> None:
    """The original's own example, about 200 BatchNorm deep: 14332 MB without a plan."""
    check_network(gpu_dry_run, "example_resnet", networks.resnet)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_searched_plans_step_in_the_memory_predicted(gpu_dry_run: GpuDryRun, name: str) -> None:
    """As above, with the whole search; and on the smallest device, to 3 % without fusion."""
    plan = check_network(gpu_dry_run, name, NETWORKS[name])
    (symbol, shapes), predicted = NETWORKS[name](), plan.device_bytes / MB
    assert fits_to_3_percent(gpu_dry_run, plan.symbol, shapes, predicted, "0")
    assert fits(gpu_dry_run, plan.symbol, shapes, int(predicted / 0.85), "1")
    assert not fits(gpu_dry_run, symbol, shapes, int(predicted / 0.97))


def test_statistics_would_move_twice(gpu_dry_run: GpuDryRun) -> None:
    """If recomputed BatchNorm were left to cuDNN: those of a chain, whose copies are all read."""
    symbol, shapes = networks.normalised_input(batch=2, image=64)
    plan = memonger.plan(symbol, shapes, planner="chen2016")
    norms, own = batch_norms(plan.symbol)
    assert norms == own == 4
    with_cudnn = marks.apply(symbol, marked_nodes(plan.symbol))
    result = run_steps(
        gpu_dry_run, {"ours": plan.symbol, "cudnn": with_cudnn}, shapes, ("0",), trace=True
    )
    assert result.ok, result.message
    assert moves(result.trace, "ours", "0") == {"own": STEPS * norms}
    assert list(moves(result.trace, "cudnn", "0").values()) == [2 * STEPS] * norms


# -- plans for a GPU alone --------------------------------------------------------------------


class Planned(NamedTuple):
    """A plan, as far as it is needed here."""

    symbol: Any
    exact: bool
    counted_bytes: int
    device_bytes: int


def plan_for_gpu(dry: DryRun) -> Any:
    """Plan on the GPU build, with pointwise fusion on; the fields of ``Planned``."""
    import sys

    import memonger
    import mxnet as mx

    text, shapes, requests, patience = dry.args
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    asked = {"grad_req": requests, "patience": patience, "ctx": mx.gpu(0)}
    plan = memonger.plan(mx.sym.load_json(text), shapes, **asked)
    print(plan, file=sys.stderr)
    symbol = plan.symbol.tojson(remove_amp_cast=False)
    return [symbol, plan.exact, plan.counted_bytes, plan.device_bytes]


def planned_for_gpu(dry_run: GpuDryRun, symbol: Any, shapes: Any) -> Planned:
    """The plan with ``ctx=mx.gpu(0)``; it is made on a device that is too small to train on."""
    from memonger.planners.marks.search import EFFORT

    text, requests = symbol.tojson(remove_amp_cast=False), as_module(symbol, shapes)
    args = [text, shapes, requests, EFFORT.patience]
    result = dry_run.run(plan_for_gpu, args=args, memory_mb=1)
    assert result.ok, result.message
    made, *figures = result.value
    return Planned(mx.sym.load_json(made), *figures)


def test_fusion_leaves_the_copies_of_a_plan_for_a_gpu_alone(gpu_dry_run: GpuDryRun) -> None:
    """A plan for any device needs more with fusion: its copies are fused."""
    symbol, shapes = NETWORKS["ResNet-50 v1"]()
    planned = planned_for_gpu(gpu_dry_run, symbol, shapes)
    assert planned.exact
    assert memonger.unplan(planned.symbol).tojson() == symbol.tojson()
    anywhere = memonger.plan(symbol, shapes, grad_req=as_module(symbol, shapes))
    symbols = {"gpu": planned.symbol, "any": anywhere.symbol}
    result = run_steps(gpu_dry_run, symbols, shapes, memory_mb=LARGE)
    assert result.ok, result.message
    found = {(kind, fusion): (pool, peak) for kind, fusion, pool, peak in result.emitted[:-1]}
    for fusion in ("0", "1"):
        pool, peak = found["gpu", fusion]
        assert pool == planned.counted_bytes // MB
        assert 0 <= peak - planned.device_bytes < 0.03 * planned.device_bytes
    assert found["any", "0"][0] == anywhere.counted_bytes // MB
    assert found["any", "1"][1] > 1.03 * anywhere.device_bytes


def test_a_plan_for_a_gpu_where_fusion_changes_the_unplanned(gpu_dry_run: GpuDryRun) -> None:
    """The replay, which knows nothing of fusion, is trusted all the same: cuts are searched."""
    symbol, shapes = networks.highway()
    planned = planned_for_gpu(gpu_dry_run, symbol, shapes)
    anywhere = memonger.plan(symbol, shapes, grad_req=as_module(symbol, shapes))
    result = run_steps(gpu_dry_run, {"unplanned": symbol}, shapes, memory_mb=LARGE)
    pools = [pool for _, _, pool, _ in result.emitted[:-1]]
    assert pools[0] != pools[1]
    assert planned.exact and planned.counted_bytes < 1.1 * anywhere.counted_bytes


# -- devices of some size ---------------------------------------------------------------------


def fits(dry_run: GpuDryRun, symbol: Any, shapes: Any, memory_mb: int, fusion: str = "0") -> bool:
    """Whether a network steps on a device of so many MB; if not, for want of memory."""
    result = run_steps(dry_run, {"it": symbol}, shapes, (fusion,), count=1, memory_mb=memory_mb)
    assert result.ok or "out of memory" in result.message, result.message
    return result.ok


def fits_to_3_percent(
    dry_run: GpuDryRun, symbol: Any, shapes: Any, predicted: float, fusion: str
) -> bool:
    """Whether the least MB on which it steps are those predicted, to 3 % of them."""
    most, least = int(predicted / 0.97), math.ceil(predicted / 1.03) - 1
    return fits(dry_run, symbol, shapes, most, fusion) and not fits(
        dry_run, symbol, shapes, least, fusion
    )


@pytest.mark.parametrize("name", ["example_resnet", "U-Net"])
def test_device_bytes_suffice(gpu_dry_run: GpuDryRun, name: str) -> None:
    """To 3 %; on that device the network fails without a plan."""
    symbol, shapes = NETWORKS[name]()
    plan = memonger.plan(symbol, shapes, grad_req=as_module(symbol, shapes))
    enough = int(1.03 * plan.device_bytes / MB)
    assert fits(gpu_dry_run, plan.symbol, shapes, enough)
    assert not fits(gpu_dry_run, plan.symbol, shapes, int(0.97 * plan.device_bytes / MB))
    assert not fits(gpu_dry_run, symbol, shapes, enough)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_smallest_device_for_a_plan_for_a_gpu(gpu_dry_run: GpuDryRun, name: str) -> None:
    """To 3 %, without fusion and with it."""
    symbol, shapes = NETWORKS[name]()
    planned = planned_for_gpu(gpu_dry_run, symbol, shapes)
    predicted = planned.device_bytes / MB
    for fusion in ("0", "1"):
        assert fits_to_3_percent(gpu_dry_run, planned.symbol, shapes, predicted, fusion)
    assert not fits(gpu_dry_run, symbol, shapes, int(predicted / 0.97))


@pytest.mark.parametrize("pool", ["Naive", "Round", "Unpooled"])
def test_storage_managers(
    gpu_dry_run: GpuDryRun, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet has three, which round differently."""
    monkeypatch.setenv("MXNET_GPU_MEM_POOL_TYPE", pool)
    symbol, shapes = networks.resnet_v2((1, 1, 1, 1), batch=3, image=100)
    plan = memonger.plan(symbol, shapes, grad_req=as_module(symbol, shapes))
    result = run_steps(
        gpu_dry_run, {"it": plan.symbol}, shapes, ("0",), env={"MXNET_GPU_MEM_POOL_TYPE": pool}
    )
    assert result.ok, result.message
    assert 0 <= result.emitted[0][3] - plan.device_bytes < 0.1 * MB


# -- elements of two bytes --------------------------------------------------------------------


def test_float16(gpu_dry_run: GpuDryRun) -> None:
    """Blocks of the pool are asked for with the real size of elements, in cuDNN's way and ours."""
    symbol, shapes = networks.resnet((2, 2, 2, 2), image=128)
    types = {"data": "float16"}
    request = as_module(symbol, shapes)
    nodes = json.loads(symbol.tojson())["nodes"]
    late = [node["name"] for node in nodes if node["op"] == "BatchNorm"][-4]  # from there cuDNN's
    plan = memonger.plan(symbol, shapes, type_dict=types, grad_req=request, until=late)
    norms, own = batch_norms(plan.symbol)
    assert 0 < own <= norms - 4
    assert plan.exact and 0.5 <= plan.pool_bytes / plan.counted_bytes < 0.6  # some are float32
    environment = {"MXNET_GPU_MEM_POOL_TYPE": "Unpooled"}  # nothing is rounded
    result = run_steps(
        gpu_dry_run, {"it": plan.symbol}, shapes, ("0",), types, env=environment, trace=True
    )
    assert result.ok, result.message
    assert sorted(moves(result.trace, "it", "0").values()) == expected_moves(plan.symbol)
    asked = [
        int(line.split()[1])
        for line in result.trace[result.trace.index("run it 0") :]
        if line.startswith("cudaMalloc ")
    ]
    graph = forward_graph(plan.symbol, read_shapes(plan.symbol, shapes, {}, types))
    training = training_graph(graph, wanted(graph, request))
    blocks = replay(training, marks.recomputed(graph)).block_bytes()
    assert blocks.sum() == plan.pool_bytes
    asked_for, expected = collections.Counter(asked), collections.Counter(blocks.tolist())
    assert not expected - asked_for
    others = asked_for - expected  # what operators share for their own use
    assert sum(size * count for size, count in others.items()) < 0.1 * MB


# -- Module on two devices --------------------------------------------------------------------


def fit(dry: DryRun) -> Any:
    """Module.fit on two GPUs; their pools in MB and the most bytes that each held."""
    import re

    import mxnet as mx

    text, shapes, kvstore = dry.args
    arrays = {name: mx.nd.zeros(shape) for name, shape in shapes.items()}
    labels = {name: arrays.pop(name) for name in list(arrays) if name.endswith("label")}
    batch = mx.io.NDArrayIter(arrays, labels, batch_size=len(next(iter(arrays.values()))))
    module = mx.mod.Module(mx.sym.load_json(text), context=[mx.gpu(0), mx.gpu(1)])
    module.bind(batch.provide_data, batch.provide_label)
    dry.note("run fit 0")
    module.fit(
        mx.io.ResizeIter(batch, 2),
        num_epoch=1,
        kvstore=kvstore,
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        batch_end_callback=lambda _: mx.nd.waitall(),
    )
    mx.nd.waitall()
    found = [executor.debug_str()[-200:] for executor in module._exec_group.execs]
    pools = [int(re.findall(r"Total (\d+) MB allocated", text)[0]) for text in found]
    return [pools, [dry.peak_bytes(k) for k in range(2)]]


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_fit_on_two_devices(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    """It fits into devices that the network does not fit into without a plan."""
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=32, image=128, filters=32)
    plan = memonger.plan(symbol, shapes, devices=2, grad_req=as_module(symbol, shapes))
    runs = {}
    for name, net in (("unplanned", symbol), ("planned", plan.symbol)):
        result = runs[name] = gpu_dry_run.run(
            fit,
            args=[net.tojson(remove_amp_cast=False), shapes, "device"],
            devices=2,
            env={"MXNET_USE_FUSION": fusion},
            trace=True,
        )
        assert result.ok, result.message
        norms, own = batch_norms(net)
        expected = sorted([STEPS] * 2 * (norms - own) + [2 * STEPS * own] * (own > 0))
        assert sorted(moves(result.trace, "fit", "0").values()) == expected
    pools, peaks = runs["planned"].value
    unplanned_pools, unplanned_peaks = runs["unplanned"].value
    if fusion == "0":
        assert pools == [plan.counted_bytes // MB] * 2
        assert unplanned_pools == [plan.candidates["no plan"] // MB] * 2
    between = max(peaks) // MB + 10
    assert between < min(unplanned_peaks) // MB
    for name, net in (("unplanned", symbol), ("planned", plan.symbol)):
        result = gpu_dry_run.run(
            fit,
            args=[net.tojson(remove_amp_cast=False), shapes, "device"],
            devices=2,
            memory_mb=between,
            env={"MXNET_USE_FUSION": fusion},
        )
        assert result.ok == (name == "planned"), (name, result.message)
        assert result.ok or "out of memory" in result.message, result.message
