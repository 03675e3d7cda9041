"""The time of operators: what is counted, what is measured, and what is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.time import classes as kinds
from memonger.costs.time import measured as timing
from memonger.costs.time.roofline import EfficiencyFactor, Rates
from memonger.graph.training import TrainingGraph, training_graph

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
    n = training.tables.forward
    rows = [i for i in range(len(values)) if i < n or i >= 2 * n]
    return {training.names[i]: float(values[i]) for i in rows if values[i]}


def test_flops() -> None:
    """A product 2 * 4 * 5 * 3; its gradient once as much for each input that gets one."""
    work = by_name(two_layers(), timing.row_flops(two_layers()))
    assert work["fc"] == 2 * 4 * 5 * 3 and work["tanh"] == 20
    assert work["fc_backward"] == 2 * work["fc"] and work["tanh_backward"] == 20


def test_bytes() -> None:
    """What is read and written, 4 bytes an element, each tensor once."""
    moved = by_name(two_layers(), timing.moved_bytes(two_layers()))
    assert moved["fc"] == 4 * (4 * 3 + 5 * 3 + 4 * 5)
    assert moved["tanh"] == 4 * (20 + 20)
    assert moved["tanh_backward"] >= 4 * (20 + 20 + 20)  # gradient, output, what is made
    assert "data" not in moved


def test_roofline() -> None:
    training = two_layers()
    names = list(training.names)
    fc, tanh, flat = (names.index(name) for name in ("fc", "tanh", "flat"))
    arithmetic = timing.predicted(training, Rates(1.0, 1e12, 0.5))
    assert arithmetic.forward[[fc, tanh, flat]] == pytest.approx([120.5, 20.5, 0])
    memory = timing.predicted(training, Rates(1e12, 1.0, 0.0))
    assert memory.forward[[fc, tanh, flat]] == pytest.approx([188, 160, 0])
    assert memory.step > memory.forward.sum()


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path))
    runs: list[Any] = []

    def measure(ctx: Any) -> Rates:
        runs.append(ctx)
        return Rates(3, 2, 1)

    monkeypatch.setattr(timing, "_measure_rates", measure)
    assert timing.rates_of(CPU) == timing.rates_of(CPU) == Rates(3, 2, 1)
    assert runs == [CPU]
    (kept,) = tmp_path.iterdir()
    content = json.loads(kept.read_text())
    assert content["mxnet"] == mx.__version__ and content["rates"] == [3, 2, 1]
    kept.write_text("{broken")
    assert timing.rates_of(CPU) == Rates(3, 2, 1) and len(runs) == 2
    monkeypatch.setattr(timing, "device_name", lambda ctx: "another")
    timing.rates_of(CPU)
    assert len(runs) == 3 and len(list(tmp_path.iterdir())) == 2


def last(symbol: Any, shapes: Any) -> Any:
    """A graph and its last operator."""
    graph = planned.forward(symbol, shapes)
    return graph, graph.operators[-1]


def of_kind(symbol: Any, **shapes: Any) -> Any:
    return kinds.example_of(*last(symbol, shapes))


def test_kinds() -> None:
    """Operators of any size are of a kind, if their kernels do the same."""
    x = S.Variable("data")

    def convolution(shape: Any, **attrs: Any) -> Any:
        return of_kind(S.Convolution(x, name="c", **attrs), data=shape)

    assert convolution((2, 32, 9, 9), num_filter=7, kernel=(1, 1)) == convolution(
        (9, 512, 4, 4), num_filter=99, kernel=(1, 1), stride=(2, 2)
    )
    every = [
        convolution((2, 32, 9, 9), num_filter=32, kernel=(3, 3)),
        convolution((2, 3, 9, 9), num_filter=32, kernel=(3, 3)),
        convolution((2, 32, 9, 9), num_filter=32, kernel=(3, 3), num_group=32),
        convolution((2, 32, 9, 9), num_filter=32, kernel=(3, 3), num_group=4),
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


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3)])
def test_constants_of_one_element(shape: Any) -> None:
    """A product with one is of a kind, and its one gets no gradient; a learned factor would."""
    x = S.Variable("data")
    example = of_kind(S.broadcast_mul(x, S.ones((1,))), data=shape)
    other = of_kind(S.broadcast_mul(S.ones((1,)), x), data=shape)
    whole = kinds.IMAGES if len(shape) == 4 else kinds.ROWS
    assert example.shapes == (whole, kinds.ONE) and other.shapes == (kinds.ONE, whole)
    for symbol in (*kinds.symbols_of(example), *kinds.symbols_of(other)):
        names = [name for name in symbol.list_arguments() if not name.endswith("_weight")]
        assert len(names) == 1 and symbol.infer_shape(**{names[0]: whole})[1] == [whole]
    assert timing._measure_pace(example, Rates(1e9, 1e9, 0), CPU) is not None
    factor = S.Variable("factor", shape=(1,))
    assert of_kind(S.broadcast_mul(x, factor), data=shape) is None


def test_what_is_compared_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until none was shorter for some time; the shortest of each counts."""
    times = {"a": [9.0, 9.0, 4.0] + [8.0] * 9, "b": [5.0] * 12}
    asked: list[str] = []

    def seconds(run: Any) -> float:
        asked.append(run())
        return times[run()].pop(0)

    monkeypatch.setattr(timing, "_seconds", seconds)
    assert timing._quickest(lambda: "a", lambda: "b") == [4, 5]
    assert asked == ["a", "b"] * (3 + timing.TIMES)


@pytest.mark.parametrize("behind", [True, False])
def test_examples_run(behind: bool) -> None:
    """An operator that takes long is found to, behind a convolution and alone."""
    x, shape = S.Variable("data"), (2, 3, 4, 5) if behind else (2, 3)
    example = of_kind(S.broadcast_power(x, x), data=shape)
    assert example.behind == behind
    symbols = kinds.symbols_of(example)
    assert len(symbols) == 1 + behind and all(len(s.list_outputs()) == 1 for s in symbols)
    rates = timing._measure_rates(CPU)
    slow, quick = (
        timing._measure_pace(of_kind(op(x, x), data=shape), rates, CPU)
        for op in (S.broadcast_power, S.elemwise_add)
    )
    assert slow is not None and quick is not None
    assert slow.forward > 3 * quick.forward


def test_paces_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path))
    now = Rates(3e8, 5e8, 0)  # something else runs while they are measured
    monkeypatch.setattr(timing, "_measure_rates", lambda ctx: now)
    monkeypatch.setattr(timing, "rates_of", lambda ctx: Rates(1e9, 1e9, 0))
    asked: list[str] = []

    def measure(example: Any, rates: Any, ctx: Any) -> Any:
        assert rates == now
        asked.append(example.op)
        return EfficiencyFactor(10.0, 100.0) if example.op == "FullyConnected" else None

    monkeypatch.setattr(timing, "_measure_pace", measure)
    training = two_layers()
    fc = list(training.names).index("fc")
    for _ in range(2):
        monkeypatch.setattr(timing, "_paces", {})  # what is on disk is read again
        assert timing.paces_of(training, CPU) == {fc: EfficiencyFactor(10.0, 100.0)}
    assert asked == ["Activation", "FullyConnected", "LinearRegressionOutput"]
    plain, slow = timing.predicted(training, Rates(1e9, 1e9, 0)), timing.times_of(training, CPU)
    assert slow.forward[fc] == 10 * plain.forward[fc]
    gradient = plain.gradient[fc]
    assert slow.step == pytest.approx(plain.step + 9 * plain.forward[fc] + 99 * gradient)


def test_gradients_that_are_not_computed() -> None:
    """They take no time: those of what does not lead to what is trained."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=5, no_bias=True, name="frozen")
    x = S.FullyConnected(
        S.Activation(x, act_type="tanh", name="tanh"), num_hidden=5, no_bias=True, name="fc"
    )
    symbol = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    graph = planned.forward(symbol, {"data": (4, 5), "label": (4, 5)})
    names = [node.name for node in graph.nodes]
    training = training_graph(graph, [names.index("fc_weight")])
    times = timing.predicted(training, Rates(1.0, 1e12, 0))
    gradient = dict(zip(names, times.gradient.tolist()))
    assert gradient["frozen"] == gradient["tanh"] == 0 and gradient["fc"] >= 2 * 4 * 5 * 5
    everything = timing.predicted(training_graph(graph), Rates(1.0, 1e12, 0))
    assert (everything.gradient[graph.operators[:3]] > 0).all()


def test_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(timing, "_measure_rates", lambda ctx: Rates(3, 2, 1))
    assert timing.rates_of(CPU) == Rates(3, 2, 1)


def test_real_rates() -> None:
    assert all(rate > 0 for rate in timing._measure_rates(CPU))


def test_operators_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct one; its time is that of recomputing it, and counts in the step."""
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "_measure_rates", lambda ctx: Rates(1e9, 1e9, 0))
    asked: list[str] = []

    def measure(graph: Any, i: int, ctx: Any) -> Any:
        asked.append(graph.nodes[i].op)
        return {"FullyConnected": (7.0, 20.0), "Activation": (2.0, 3.0)}.get(graph.nodes[i].op)

    monkeypatch.setattr(timing, "_measure", measure)
    monkeypatch.setattr(timing, "paces_of", lambda training, ctx: {})
    x = S.Variable("data")
    for k in range(3):  # three equal layers
        x = S.Activation(S.FullyConnected(x, num_hidden=5, name="fc%d" % k), act_type="tanh")
    symbol = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    training = training_graph(planned.forward(symbol, {"data": (4, 5)}))
    for _ in range(2):
        times = timing.measured(training, CPU)
        assert asked == ["FullyConnected", "Activation", "LinearRegressionOutput"]
        found = [times.forward[list(training.names).index("fc%d" % k)] for k in range(3)]
        assert found == [7.0] * 3
        assert times.step == pytest.approx(3 * (20 + 3), abs=0.01)


def test_constants_are_not_measured_as_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As inputs they would get a gradient, which takes time: the pace of the kind counts."""
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "_measure_rates", lambda ctx: Rates(1e9, 1e9, 0))
    monkeypatch.setattr(
        timing, "_measure_pace", lambda example, rates, ctx: EfficiencyFactor(2.0, 3.0)
    )
    asked: list[str] = []
    monkeypatch.setattr(timing, "_measure", lambda graph, i, ctx: asked.append(graph.nodes[i].op))
    x = S.FullyConnected(S.Variable("data"), num_hidden=5, name="fc")
    tied = S.broadcast_mul(x, S.ones((1,)), name="tie")
    symbol = S.LinearRegressionOutput(tied, S.Variable("label"), name="out")
    training = training_graph(planned.forward(symbol, {"data": (4, 5)}))
    tie = list(training.names).index("tie")
    found, plain = timing.measured(training, CPU), timing.predicted(training, Rates(1e9, 1e9, 0))
    assert "FullyConnected" in asked and "broadcast_mul" not in asked
    assert found.forward[tie] == 2 * plain.forward[tie] > 0
    assert found.gradient[tie] == 3 * plain.gradient[tie] > 0


def test_an_operator_alone() -> None:
    symbol = S.Embedding(S.Variable("data"), input_dim=10, output_dim=4, name="e")
    graph = planned.forward(symbol, {"data": (3,)}, {"data": "int32", "e_weight": "float32"})
    found = timing._measure(graph, graph.operators[0], CPU)
    assert found is not None and 0 < found[0] and 0 < found[1]
