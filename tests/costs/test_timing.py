"""The time of operators: what is counted, what is measured, and what is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.time import measured as timing
from memonger.costs.time.measured import Rates
from memonger.graph.training import TrainingGraph, training_graph

import networks
import planned

pytestmark = pytest.mark.python_differs

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
    n = training.arrays.forward
    return {training.names[i]: values[i] for i in np.flatnonzero(values) if not n <= i < 2 * n}


def test_flops_and_bytes_are_counted_by_row() -> None:
    """A gradient of a product once for each input; 4 bytes an element, each tensor once."""
    work = by_name(two_layers(), timing.count_row_flops(two_layers()))
    assert work["fc"] == 2 * 4 * 5 * 3 and work["tanh"] == 20
    assert work["fc_backward"] == 2 * work["fc"] and work["tanh_backward"] == 20
    moved = by_name(two_layers(), timing.count_moved_bytes(two_layers()))
    assert moved["fc"] == 4 * (4 * 3 + 5 * 3 + 4 * 5) and moved["tanh"] == 4 * (20 + 20)
    assert moved["tanh_backward"] >= 4 * (20 + 20 + 20)  # gradient, output, what is made
    assert "data" not in moved


def test_the_slower_of_arithmetic_and_memory_is_the_time() -> None:
    training = two_layers()
    rows = [training.names.index(name) for name in ("fc", "tanh", "flat")]
    arithmetic = timing.predict_times(training, Rates(1.0, 1e12, 0.5))
    assert arithmetic.forward[rows] == pytest.approx([120.5, 20.5, 0])
    memory = timing.predict_times(training, Rates(1e12, 1.0, 0.0))
    assert memory.forward[rows] == pytest.approx([188, 160, 0])
    assert memory.step > memory.forward.sum()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Open a new cache folder; return what reads its values of a kind and adds to them."""
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path))

    def again(what: str, **values: Any) -> dict[str, Any]:
        (file,) = tmp_path.glob(what + "-*.json")
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, **values}))
        return content

    return again


def test_rates_are_measured_once(disk: Any) -> None:
    first = timing.find_rates(CPU)
    assert all(rate > 0 for rate in first) and timing.find_rates(CPU) == first
    content = disk("rates", rates=[3, 2, 1])
    assert content["mxnet"] == mx.__version__ and content["rates"] == list(first)
    assert timing.find_rates(CPU) == Rates(3, 2, 1)


def of_kind(symbol: Any, **shapes: Any) -> Any:
    graph = planned.forward(symbol, shapes)
    return timing.choose_example(graph, graph.operators[-1])


def test_operators_of_any_size_are_of_a_kind_if_their_kernels_do_the_same() -> None:
    """Operators of any size are of a kind, if their kernels do the same."""
    x = S.Variable("data")

    def convolution(shape: Any, filters: int, size: int, **attrs: Any) -> Any:
        kernel = {"kernel": (size, size), "num_filter": filters}
        return of_kind(S.Convolution(x, name="c", **kernel, **attrs), data=shape)

    image = (2, 32, 9, 9)
    assert convolution(image, 7, 1) == convolution((9, 512, 4, 4), 99, 1, stride=(2, 2))
    every = [
        *(convolution(image, 32, 3, num_group=groups) for groups in (1, 4, 32)),
        convolution((2, 3, 9, 9), 32, 3),
        of_kind(S.clip(x, 0, 6), data=(2, 3, 4, 5)),
        of_kind(S.clip(x, 0, 6), data=(2, 3)),
        of_kind(S.BatchNorm(x, name="b"), data=(2, 3, 4, 5)),
        of_kind(S.Pooling(x, kernel=(2, 2), pool_type="max"), data=(2, 3, 4, 5)),
        of_kind(S.SliceChannel(x, num_outputs=2)[0], data=(2, 6)),
        of_kind(S.FullyConnected(x, num_hidden=3, name="f"), data=(2, 6)),
    ]
    assert len({*every}) == len(every) and None not in every
    assert of_kind(S.Dropout(x), data=(2, 3)) is None  # never recomputed
    assert of_kind(S.transpose(x), data=(2, 3)) is None
    assert of_kind(S.BatchNorm(x, name="b"), data=(2, 3)) is None
    learned = S.Variable("factor", shape=(1,))  # timed as a constant of one element is
    example = of_kind(S.broadcast_mul(x, S.ones((1,))), data=(2, 3))
    assert example.shapes == (timing.ROWS, timing.ONE)
    assert of_kind(S.broadcast_mul(x, learned), data=(2, 3)) == example


@pytest.mark.parametrize("behind", [True, False])
def test_the_pace_of_a_kind_multiplies_its_time(behind: bool, disk: Any) -> None:
    x, shape = S.Variable("data"), (2, 3, 4, 5) if behind else (2, 3)
    slow, quick = S.broadcast_power(x, x, name="slow"), S.elemwise_add(x, x, name="quick")
    example = of_kind(slow, data=shape)
    assert example.behind == behind
    symbols = timing.build_symbols(example)
    assert len(symbols) == 1 + behind and all(len(s.list_outputs()) == 1 for s in symbols)
    tied = S.broadcast_mul(x, S.ones((1,)), name="tied")
    graph = planned.forward(S.Group([slow, quick, tied]), {"data": shape})
    training, names = training_graph(graph), [node.name for node in graph.nodes]
    paces = {names[i]: pace for i, pace in timing.find_factors(training, CPU).items()}
    assert paces["slow"][0] > 3 * paces["quick"][0] and "tied" in paces
    content = disk("kinds", **{json.dumps(example): [10.0, 100.0]})
    assert json.dumps(example) in content
    factors, i = timing.find_factors(training, CPU), names.index("slow")
    assert factors[i] == (10.0, 100.0)
    rates = Rates(1e9, 1e9, 0)
    plain, longer = (
        timing.predict_times(training, rates),
        timing.predict_times(training, rates, factors),
    )
    assert longer.forward[i] == 10 * plain.forward[i]
    assert longer.gradient[i] == 100 * plain.gradient[i]
    assert longer.step > plain.step + 9 * plain.forward[i]


def test_gradients_that_are_not_computed() -> None:
    """They take no time: those of what does not lead to what is trained."""
    layer: dict[str, Any] = {"num_hidden": 5, "no_bias": True}
    x = S.FullyConnected(S.Variable("data"), name="frozen", **layer)
    x = S.FullyConnected(S.tanh(x, name="tanh"), name="fc", **layer)
    symbol = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    graph = planned.forward(symbol, {"data": (4, 5), "label": (4, 5)})
    names = [node.name for node in graph.nodes]
    training = training_graph(graph, [names.index("fc_weight")])
    times = timing.predict_times(training, Rates(1.0, 1e12, 0))
    gradient = dict(zip(names, times.gradient.tolist()))
    assert gradient["frozen"] == gradient["tanh"] == 0 and gradient["fc"] >= 2 * 4 * 5 * 5
    everything = timing.predict_times(training_graph(graph), Rates(1.0, 1e12, 0))
    assert (everything.gradient[list(graph.operators[:3])] > 0).all()


def test_rates_are_kept_by_the_process_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path / "file"))
    first = timing.find_rates(CPU)
    assert first.flops > 0 and timing.find_rates(CPU) == first  # this process keeps it


def test_operators_are_measured_once(disk: Any) -> None:
    """Each distinct one. Constants are no inputs, whose gradient takes time: their class counts."""
    x = S.Variable("data")
    for k in range(3):  # three equal layers
        x = S.Activation(S.FullyConnected(x, num_hidden=5, name=f"fc{k}"), act_type="tanh")
    x = S.broadcast_mul(x, S.ones((1,)), name="tie")
    x = S.Embedding(x, input_dim=10, output_dim=4, name="embed")
    training = training_graph(planned.forward(S.MakeLoss(x, name="loss"), {"data": (4, 5)}))
    names = list(training.names)
    first = timing.find_times(training, CPU, measure=True)
    assert (first.forward[[names.index("fc0"), names.index("embed")]] > 0).all()
    content = disk("operators")
    keys = {json.loads(key)[0]: key for key in content if key[0] == "["}
    assert len(keys) == len(content) - 2 and "broadcast_mul" not in keys
    assert {"FullyConnected", "Activation", "Embedding"} <= set(keys)
    assert all(seconds > 0 for seconds in content[keys["FullyConnected"]])
    disk("operators", **{key: [7.0, 20.0] for key in keys.values()})
    disk("rates", rates=[1e15, 1e15, 0.0])  # what is predicted takes no time
    tie = json.dumps(timing.choose_example(training.graph, names.index("tie")))
    disk("kinds", **{tie: [2.0, 3.0]})
    times = timing.find_times(training, CPU, measure=True)
    assert [times.forward[names.index(f"fc{k}")] for k in range(3)] == [7.0] * 3
    assert [times.gradient[names.index(f"fc{k}")] for k in range(3)] == [13.0] * 3
    plain = timing.predict_times(training, timing.find_rates(CPU))
    assert times.forward[names.index("tie")] == 2 * plain.forward[names.index("tie")] > 0
    assert times.gradient[names.index("tie")] == 3 * plain.gradient[names.index("tie")] > 0
    alone = times.forward == 7
    assert times.step == pytest.approx((times.forward + times.gradient)[alone].sum(), abs=0.01)


def test_a_gpu_that_is_not_here_has_the_times_of_its_data_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Nothing of this machine is in them: nothing is measured here."""
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path))
    caplog.set_level("INFO", "memonger")
    symbol, shapes = networks.chain(12, hidden=32, batch=4096)
    options: Any = {"budget": "80%", "how": "schedule", "patience": 0.02}
    usual = memonger.plan(symbol, shapes, ctx="gpu", **options)
    assert "times are those of gpu='V100' by its data sheet" in caplog.text
    assert usual.options["gpu"] == "V100" and "is added, as predicted for V100" in str(usual)
    named = memonger.plan(symbol, shapes, ctx="gpu", gpu="L4", **options)
    assert named.added_time != usual.added_time and "predicted for L4" in str(named)
    frontier = memonger.frontier(symbol, shapes, gpu="L4", patience=0.02)
    alone = memonger.plan(symbol, shapes, gpu="L4", patience=0.02)
    assert alone.predict_time() == pytest.approx(frontier[-1].added_time, rel=0.2)
    assert not any(tmp_path.iterdir())
    memonger.plan(symbol, shapes, **options)
    assert any(tmp_path.glob("rates-*"))


def test_what_is_dear_on_one_gpu_is_cheap_on_another() -> None:
    """A product of some intensity is slower on a V100 than two sums, and faster on an L4."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=256, no_bias=True, name="fc")
    x = S.sin(S.sin(x, name="first"), name="second")
    training = training_graph(planned.forward(S.MakeLoss(x), {"data": (8192, 256)}))
    fc, first, second = map(list(training.names).index, ("fc", "first", "second"))
    volta, ada = (timing.find_times(training, gpu).forward for gpu in ("V100", "L4"))
    assert volta[fc] > volta[first] + volta[second] and ada[fc] < ada[first] + ada[second]
