"""The times of operators: predicted by data sheets, the same everywhere, or measured elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.time import cpu, gpus, measured, roofline
from memonger.costs.time.cpu import NOMINAL_CPU
from memonger.costs.time.gpus import GPUS, Rates
from memonger.costs.time.roofline import predict_times
from memonger.graph.training import TrainingGraph, training_graph
from memonger.solve.facts import find_times
from memonger.solve.network import TimedDevice

import networks
import planned


S = mx.sym
CPU = mx.cpu()


def two_layers() -> TrainingGraph:
    """data (4, 3) -> product with (5, 3) -> tanh -> reshape -> loss."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=5, no_bias=True, name="fc")
    x = S.Reshape(S.Activation(x, act_type="tanh", name="tanh"), shape=(2, 10), name="flat")
    symbol = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    graph = planned.forward(symbol, {"data": (4, 3), "label": (2, 10)})
    weight = [a for a in graph.arguments if graph.nodes[a].name == "fc_weight"]
    return training_graph(graph, weight)


def by_name(training: TrainingGraph, values: np.ndarray) -> Any:
    n = training.arrays.forward_nodes
    return {training.names[i]: values[i] for i in np.flatnonzero(values) if not n <= i < 2 * n}


def test_flops_and_bytes_are_counted_by_row() -> None:
    """A gradient of a product once for each input; 4 bytes an element, each tensor once."""
    work = by_name(two_layers(), roofline.count_row_flops(two_layers()))
    assert work["fc"] == 2 * 4 * 5 * 3 and work["tanh"] == 20
    assert work["fc_backward"] == 2 * work["fc"] and work["tanh_backward"] == 20
    moved = by_name(two_layers(), roofline.count_moved_bytes(two_layers()))
    assert moved["fc"] == 4 * (4 * 3 + 5 * 3 + 4 * 5) and moved["tanh"] == 4 * (20 + 20)
    assert moved["tanh_backward"] >= 4 * (20 + 20 + 20)  # gradient, output, what is made
    assert "data" not in moved


def test_the_slower_of_arithmetic_and_memory_is_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    training = two_layers()
    rows = [training.names.index(name) for name in ("fc", "tanh", "flat")]
    monkeypatch.setitem(GPUS, "of one FLOP/s", Rates(1.0, 1e12, 0.5))
    monkeypatch.setitem(GPUS, "of one byte/s", Rates(1e12, 1.0, 0.0))
    arithmetic = predict_times(training, "of one FLOP/s")
    assert arithmetic.forward_seconds[rows] == pytest.approx([120.5, 20.5, 0])
    memory = predict_times(training, "of one byte/s")
    assert memory.forward_seconds[rows] == pytest.approx([188, 160, 0])
    assert memory.step_seconds > memory.forward_seconds.sum()


def test_gradients_that_are_not_computed() -> None:
    """They take no time: those of what does not lead to what is trained."""
    layer: dict[str, Any] = {"num_hidden": 5, "no_bias": True}
    x = S.FullyConnected(S.Variable("data"), name="frozen", **layer)
    x = S.FullyConnected(S.tanh(x, name="tanh"), name="fc", **layer)
    symbol = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    graph = planned.forward(symbol, {"data": (4, 5), "label": (4, 5)})
    names = [node.name for node in graph.nodes]
    for device in (NOMINAL_CPU, "V100"):
        times = predict_times(training_graph(graph, [names.index("fc_weight")]), device)
        gradient = dict(zip(names, times.gradient_seconds.tolist()))
        assert gradient["frozen"] == gradient["tanh"] == 0 and gradient["fc"] > 0
        everything = predict_times(training_graph(graph), device)
        assert (everything.gradient_seconds[list(graph.operators[:3])] > 0).all()


def class_of(symbol: Any, **shapes: Any) -> str:
    graph = planned.forward(symbol, shapes)
    return cpu.find_class(graph, graph.operators[-1])


def test_an_operator_is_of_the_class_of_its_kernel() -> None:
    """By what bears on its kernel: parameters, and whether inputs have one shape; not its size."""
    x, y, image = S.Variable("data"), S.Variable("y"), (2, 4, 9, 9)
    kernel: dict[str, Any] = {"kernel": (3, 3), "num_filter": 8}
    assert class_of(S.Convolution(x, **kernel), data=image) == "Convolution"
    grouped = S.Convolution(x, num_group=4, **kernel)
    assert class_of(grouped, data=image) == "Convolution:grouped"
    for act, name in (("tanh", "Activation:tanh"), ("softsign", "Activation")):
        assert class_of(S.Activation(x, act_type=act), data=(2, 3)) == name
    assert class_of(S.LeakyReLU(x), data=image) == "LeakyReLU:leaky"
    for pool, name in (("max", "Pooling:max"), ("avg", "Pooling")):
        assert class_of(S.Pooling(x, kernel=(2, 2), pool_type=pool), data=image) == name
    assert class_of(S.Pooling(x, kernel=(2, 2)), data=image) == "Pooling:max"
    sums = S.broadcast_add(x, y)
    assert class_of(sums, data=(2, 3), y=(2, 3)) == "broadcast_add"
    assert class_of(sums, data=(2, 3), y=(2, 1)) == "broadcast:other"
    assert class_of(S.np.exp(S.Variable("data").as_np_ndarray()), data=(2, 3)) == "exp"


def test_what_is_dear_on_one_gpu_is_cheap_on_another() -> None:
    """A product of some intensity is slower on a V100 than two sums, and faster on an L4."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=256, no_bias=True, name="fc")
    x = S.sin(S.sin(x, name="first"), name="second")
    training = training_graph(planned.forward(S.MakeLoss(x), {"data": (8192, 256)}))
    fc, first, second = map(list(training.names).index, ("fc", "first", "second"))
    volta, ada = (predict_times(training, gpu).forward_seconds for gpu in ("V100", "L4"))
    assert volta[fc] > volta[first] + volta[second] and ada[fc] < ada[first] + ada[second]


# -- the same everywhere ------------------------------------------------------------------------


def found_plans() -> list[Any]:
    """Return the times, symbols and schedules of two plans."""
    found = []
    for how in ("marks", "schedule"):
        network = networks.resnet_v2((1, 1), batch=32, filters=16)
        plan = memonger.plan(*network, budget=0.7, how=how, patience=0.01)
        operations = plan.schedule and plan.schedule.operations.tolist()
        found.append((plan.time_overhead, plan.symbol.tojson(), operations))
    return found


def plan_elsewhere(profile: str) -> tuple[list[Any], set[str], float]:
    """Return plans, the operators that ran meanwhile, and the MB taken."""
    before = planned.process_mb("VmHWM")
    mx.profiler.set_config(profile_all=True, aggregate_stats=True, filename=profile)
    mx.profiler.set_state("run")
    found = found_plans()
    mx.nd.waitall()
    mx.profiler.set_state("stop")
    rows = [line.split() for line in mx.profiler.dumps().splitlines()]
    names = {words[0] for words in rows if len(words) == 6 and words[1].isdigit()}
    ran = {name for name in names if hasattr(mx.nd.op, name) or hasattr(mx.nd._internal, name)}
    return found, ran, planned.process_mb("VmHWM") - before


@pytest.mark.late
def test_planning_runs_no_operator_and_finds_the_same_everywhere(tmp_path: Path) -> None:
    """With any number of threads, whatever was called before; nothing is put on the disk."""
    (tmp_path / "cache").mkdir()
    settings = {"MEMONGER_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}
    profile = str(tmp_path / "profile.json")
    plans, ran, grown = planned.elsewhere(plan_elsewhere, profile, **settings)[0]
    mx.nd.dot(mx.nd.ones((256, 256)), mx.nd.ones((256, 256))).wait_to_read()
    plan = memonger.plan(*networks.chain(4, hidden=8, batch=64), patience=0.01, how="marks")
    assert plan.predict_time(measure=True) != plan.time_overhead
    assert plans == found_plans() and all(added for added, *_ in plans)
    assert not ran
    assert grown < 60  # MB: operators that ran would take hundreds
    assert not any((tmp_path / "cache").iterdir())


# -- whose times --------------------------------------------------------------------------------


def test_a_gpu_that_is_not_here_has_the_times_of_its_data_sheet(caplog: Any) -> None:
    caplog.set_level("INFO", "memonger")
    symbol, shapes = networks.chain(12, hidden=32, batch=4096)
    options: Any = {"budget": "80%", "how": "schedule", "patience": 0.02}
    usual = memonger.plan(symbol, shapes, ctx="gpu", **options)
    assert "times from the data sheet of 'V100'; set gpu= for another" in caplog.text
    assert usual.options["gpu"] == "V100" and "is added, as predicted for V100" in str(usual)
    named = memonger.plan(symbol, shapes, ctx="gpu", gpu="L4", **options)
    assert named.time_overhead != usual.time_overhead and "predicted for L4" in str(named)
    frontier = memonger.frontier(symbol, shapes, gpu="L4", patience=0.02, how="marks")
    alone = memonger.plan(symbol, shapes, gpu="L4", patience=0.02, how="marks")
    assert alone.predict_time() == pytest.approx(frontier[-1].time_overhead, rel=0.2)
    on_cpu = memonger.plan(symbol, shapes, **options)
    assert on_cpu.options.get("gpu") is None and on_cpu.time_overhead != usual.time_overhead


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("Tesla T4", "T4"),
        *((name, None) for name in ("NVIDIA L40", "NVIDIA GeForce RTX 2080", "Quadro T400", "")),
    ],
)
def test_a_gpu_that_is_here_is_found_by_its_name(
    name: str, sheet: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """An unknown one has the times of a V100; one line says so."""
    monkeypatch.setattr(gpus, "read_gpu_name", lambda device_id: name)
    gpus.find_sheet.cache_clear()
    found = [gpus.find_sheet(0) for _ in range(2)]
    gpus.find_sheet.cache_clear()
    assert found == [sheet or "V100"] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (sheet is None) and all("V100" in line for line in lines)


# -- measured -----------------------------------------------------------------------------------


def test_operators_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct one, in one child."""
    jobs: list[Any] = []
    run_child = measured.run_child

    def count(module: str, job: Any) -> Any:
        jobs.append(job)
        return run_child(module, job)

    monkeypatch.setattr(measured, "run_child", count)
    x = S.Variable("data")
    for k in range(3):  # three equal layers
        x = S.Activation(S.FullyConnected(x, num_hidden=5, name=f"fc{k}"), act_type="tanh")
    x = S.Embedding(x, input_dim=10, output_dim=4, name="embed")
    training = training_graph(planned.forward(S.MakeLoss(x, name="loss"), {"data": (4, 5)}))
    names = list(training.names)
    predicted, times = (find_times(training, TimedDevice(NOMINAL_CPU, c)) for c in (None, CPU))
    again = find_times(training, TimedDevice(NOMINAL_CPU, CPU))
    (job,) = jobs
    ops = [op for op, *_ in job["operators"]]
    assert sorted({*ops}) == sorted(ops) and {"FullyConnected", "Activation", "Embedding"} <= {*ops}
    layers = [names.index(f"fc{k}") for k in range(3)]
    assert len({*times.forward_seconds[layers]}) == 1 and times.forward_seconds[layers[0]] > 0
    assert (times.forward_seconds != predicted.forward_seconds).any()
    assert times.gradient_seconds[layers[0]] > 0
    assert again.step_seconds == times.step_seconds
    assert np.array_equal(again.forward_seconds, times.forward_seconds)
    more = (times.forward_seconds - predicted.forward_seconds).sum()
    more += (times.gradient_seconds - predicted.gradient_seconds).sum()
    assert times.step_seconds == pytest.approx(predicted.step_seconds + more)


@pytest.mark.slow
def test_an_operator_that_crashes_costs_one_figure(caplog: Any) -> None:
    """It has the time that is predicted; those before it and behind it are measured.

    A whole number that is divided by 0 ends the process, and indices are 0 when they are measured.
    """
    x = S.Activation(S.Variable("data"), act_type="tanh", name="before")
    whole = S.Cast(x, dtype="int32", name="whole")
    x = S.Cast(S.elemwise_div(whole, whole, name="crash"), dtype="float32", name="back")
    symbol = S.MakeLoss(S.sin(x, name="behind"), name="loss")
    training = training_graph(planned.forward(symbol, {"data": (4, 5)}))
    predicted = predict_times(training, NOMINAL_CPU)
    times = find_times(training, TimedDevice(NOMINAL_CPU, CPU))
    names = [node.name for node in training.graph.nodes]
    same = dict(zip(names, (times.forward_seconds == predicted.forward_seconds).tolist()))
    assert same["crash"] and not any(same[name] for name in ("before", "whole", "back", "behind"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "elemwise_div of (4, 5), (4, 5)" in line and "SIGFPE" in line and "predicted" in line


def test_without_a_child_process_all_times_are_predicted(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    symbol = S.MakeLoss(S.cos(S.Variable("data")))
    training = training_graph(planned.forward(symbol, {"data": (7,)}))
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    times = find_times(training, TimedDevice(NOMINAL_CPU, CPU))
    assert times.step_seconds == predict_times(training, NOMINAL_CPU).step_seconds
    assert "no operator can be measured" in caplog.text and "/nowhere/python" in caplog.text
