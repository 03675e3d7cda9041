"""The training step of a schedule is the network's, bit for bit; its memory, byte for byte."""

from __future__ import annotations

import functools
import re
from typing import Any, Iterable

import memonger
import mxnet as mx
import pytest
from memonger.costs.bind import has_mkldnn
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.schedule import check
from memonger.schedules.training_step import TrainingStep
from memonger.schedules.expand import build_step, make_parts, step_for
from memonger.solve.memory import predict_step
from memonger.support.mxnet import environment

import networks
from operator_cases import ALL_CASES, CASES, CASES_OF_NP, PLANNED_SHAPES, SMALL_SHAPES
from operator_cases import planned_net, small_net
from zoo import DETECTION, LARGE, OUTPUTS, TINY, Builders, drawn
from planned import as_module, assert_alike, forward, positive
from alive import check_memory
from drawn_schedules import LEVELS, everything, work_of

SMALL_NETWORKS: Builders = {
    **TINY,
    **OUTPUTS,
    **DETECTION,
    **{f"drawn {seed}": functools.partial(drawn, seed) for seed in (1, 2, 3)},
}


def train(symbol: Any, shapes: Any, levels: Iterable[str], added: str = "", **more: Any) -> None:
    """Check that these schedules, one with added gradients, change no bit and take what is told.

    With every other one, whatever is dead is overwritten: no operator reads it.
    """
    types = more.get("type_dict")
    work = work_of(symbol, shapes, type_dict=types)
    for k, level in enumerate(levels):
        schedule = LEVELS[level](work, 0)
        check(work, schedule)
        requests = as_module(symbol, shapes)
        if level == added:
            requests = dict.fromkeys(requests, "add")
        planned = scheduled(symbol, schedule)
        with environment(MEMONGER_POISON="" if k % 2 else "1"):
            assert_alike(symbol, planned, shapes, grad_req=requests, **more)
        executor = planned.simple_bind(mx.cpu(), requests, types, **shapes)
        outputs = {
            id(a): a for a in executor.outputs if all(a is not b for b in executor.arg_arrays)
        }
        taken = executor.arena.nbytes + sum(a.size * a.dtype().itemsize for a in outputs.values())
        step = step_for(forward(symbol, shapes, types), schedule, requests, has_mkldnn(mx.cpu()))
        assert taken == predict_step(step).pool_bytes
        check_memory(step)


KNOWN = sorted(set(CASES) - {"foreach"})  # control flow is refused by name
OF_NP = sorted(set(CASES_OF_NP) - {"np_vstack"})  # which writes into no array
#: Of these operators the layout in which MKLDNN finds their input decides the last bits, or more.
LAID_OUT = ["BatchNorm", "BatchNorm_axis", "Convolution_3d", "Deconvolution", "Embedding_plus"]
LAID_OUT += ["FullyConnected", "Pooling_max", "log_softmax", "slice", "ten_uses", "unravel_index"]


SMALL, INSIDE = (small_net, SMALL_SHAPES), (planned_net, PLANNED_SHAPES)
FAST = [level for level in LEVELS if level != "everything"]
ALONE, DEEP = ("one level", "everything"), ("three levels", "six levels")
EXHAUSTIVE = pytest.mark.exhaustive
OPERATORS = [
    *(pytest.param(n, SMALL, ALONE[k % 3 > 0 :], id=n) for k, n in enumerate(KNOWN)),
    # Behind convolutions, whose outputs MKLDNN lays out in blocks.
    *(pytest.param(name, INSIDE, DEEP, id=f"{name} inside") for name in LAID_OUT),
    *(pytest.param(n, SMALL, ALONE, id=n, marks=EXHAUSTIVE) for n in OF_NP),
    *(pytest.param(n, INSIDE, DEEP, id=f"{n} inside", marks=EXHAUSTIVE) for n in OF_NP),
    *(pytest.param(n, SMALL, LEVELS, id=f"{n}, all levels", marks=EXHAUSTIVE) for n in KNOWN),
    *(pytest.param(n, INSIDE, LEVELS, id=f"{n} inside, all", marks=EXHAUSTIVE) for n in KNOWN),
]


@pytest.mark.parametrize("name, where, levels", OPERATORS)
def test_every_operator_trains_to_the_same_bits_in_the_memory_predicted(
    name: str, where: Any, levels: Iterable[str]
) -> None:
    build, shapes = where
    symbol = build(ALL_CASES[name])
    added = "one level" if build is small_net else ""
    train(symbol, shapes, levels, added, steps=2, values=positive(symbol, shapes))


def test_operators_are_put_in_where_layouts_differ() -> None:
    work = work_of(*drawn(7))
    parts = make_parts(work)
    operators = set().union(*(inserted(build_step(parts, LEVELS[name](work, 0))) for name in FAST))
    assert operators == {"Pooling", "Reshape", "add_n", "max"}
    assert make_parts(work_of(*networks.lstm(steps=5))).expected is None  # no convolutions


def inserted(step: TrainingStep) -> set[str]:
    return {k.op for k, source in zip(step.signatures, step.rows.source) if source < 0} - {"null"}


def test_no_schedule_is_refused_for_layouts_where_there_are_none() -> None:
    work = work_of(*drawn(9))
    schedule = LEVELS["six levels"](work, 0)
    with pytest.raises(memonger.MemongerError, match="would lay out what") as caught:
        build_step(make_parts(work), schedule)
    names = set(re.findall("'(.*?)'", str(caught.value))) - {"marks"}
    assert names and names <= {node.name for node in work.training.graph.nodes}
    assert inserted(build_step(make_parts(work, mkldnn=False), schedule)) <= {"max"}


def test_what_is_read_for_its_shape_may_lie_in_any_layout() -> None:
    """A BlockGrad's gradient is zeros of its input's shape: no schedule is refused for that."""
    x = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), pad=(1, 1), num_filter=2)
    x = mx.sym.FullyConnected(mx.sym.BlockGrad(mx.sym.Dropout(x, p=0.3)), num_hidden=3)
    symbol = mx.sym.SoftmaxOutput(x, name="softmax")
    train(symbol, {"data": (1, 2, 2, 2), "softmax_label": (1,)}, LEVELS)


def test_names_may_have_any_letters() -> None:
    x = mx.sym.Variable("données")
    for i in range(4):
        x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=4, name=f"é{i}"), "tanh")
    symbol, shapes = mx.sym.SoftmaxOutput(x, name="softmax"), {"données": (2, 4)}
    train(symbol, shapes, LEVELS)
    marks = memonger.search_plan(symbol, shapes=shapes)
    assert memonger.check(symbol, marks, shapes) and memonger.unplan(marks).tojson()


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_network_with_nothing_to_plan_gets_no_plan(how: str) -> None:
    S, x, shapes = mx.sym, mx.sym.Variable("data"), {"data": (4, 8)}
    fixed = S.FullyConnected(S.BlockGrad(x), num_hidden=2, name="fc")
    loss = S.LinearRegressionOutput(x, name="out")
    noise = S.MakeLoss(S.random.uniform(shape=(4, 8)) * x)  # runs once
    small = S.LinearRegressionOutput(S.FullyConnected(x, num_hidden=4), name="out")
    softmax = S.SoftmaxOutput(fixed, name="softmax")
    for net in (S.MakeLoss(x), S.BlockGrad(x), softmax, loss, noise, small):
        for options in ({}, {"grad_req": {"data": "write"}}, {"budget": 1.0}):
            plan = memonger.plan(net, shapes, how=how, patience=0.02, **options)
            assert plan.pool_bytes <= plan.unplanned_bytes and not plan.recomputed
            if net is small:
                assert (plan.planner, plan.schedule, plan.gradient_bytes) == ("no plan", None, 0)
        assert len(memonger.frontier(net, shapes, how=how, patience=0.02)) == 1


def test_networks_without_a_schedule_are_refused_in_words() -> None:
    data = mx.sym.Variable("data")
    x = mx.sym.Embedding(data, input_dim=5, output_dim=2, sparse_grad=True)
    for symbol, words in ((data, "no operators"), (mx.sym.MakeLoss(x), "row by row")):
        with pytest.raises(memonger.MemongerError, match=words):
            memonger.plan(symbol, {"data": (4,)}, how="schedule")
    for name, words in (("foreach", "_foreach"), ("np_vstack", "_npi_vstack")):
        with pytest.raises(memonger.MemongerError, match=rf"\({words}\) cannot be part"):
            work_of(small_net(ALL_CASES[name]), SMALL_SHAPES)


def biased(times: int) -> Any:
    """Let several FullyConnected share one bias, with statistics that their gradients move."""
    x, bias = mx.sym.Variable("data"), mx.sym.Variable("bias")
    for k in range(times):
        x = mx.sym.tanh(mx.sym.FullyConnected(x, bias=bias, num_hidden=4, name=f"fc{k}"))
    return mx.sym.MakeLoss(mx.sym.square(mx.sym.BatchNorm(x, name="bn")))


def test_bias_of_a_fixed_weight_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As MKLDNN leaves it out without a schedule; it would be what was in the memory before."""
    net, shapes = biased(1), {"data": (2, 4)}  # with one operator, then with two
    planned = scheduled(net, everything(work_of(net, shapes, ["bias"])))
    requests = {n: "write" if n == "bias" else "null" for n in net.list_arguments()}
    assert_alike(net, planned, shapes, grad_req=requests)
    assert "'bias' gets no gradient" in caplog.text
    shared = biased(2)
    planned = scheduled(shared, everything(work_of(shared, shapes, ["bias"])))
    with pytest.raises(memonger.MemongerError, match="bias of 'fc[01]' is used more than once"):
        planned.simple_bind(mx.cpu(), {"bias": "write"}, data=(2, 4))


@pytest.mark.parametrize("name", ["Convolution", "BatchNorm", "FullyConnected", "LayerNorm"])
def test_operators_in_float64_train_to_the_same_bits(name: str) -> None:
    symbol = small_net(CASES[name])
    types = {"data": "float64"}
    graph = forward(symbol, SMALL_SHAPES, types)
    assert {tensor.dtype for tensors in graph.tensors for tensor in tensors} == {"float64"}
    values = positive(symbol, SMALL_SHAPES)
    train(symbol, SMALL_SHAPES, ALONE, type_dict=types, values=values)


@pytest.mark.parametrize("name", sorted(SMALL_NETWORKS))
def test_every_small_network_trains_to_the_same_bits_by_schedules_of_all_levels(name: str) -> None:
    symbol, shapes = SMALL_NETWORKS[name]()
    # Trained longer, the one with shared weights diverges.
    steps = 1 if name == "shared weights" else 2
    small = len(work_of(symbol, shapes).operators) < 60
    levels = ["plain", "marks", "six levels", "one level", "everything"]
    train(symbol, shapes, levels if small else levels[:3], steps=steps)


@pytest.mark.parametrize(
    "name", ["resnet50_v1", "densenet121", "unet", "transformer", "many uses", "mx.rnn"]
)
def test_the_memory_of_large_networks_is_predicted(name: str) -> None:
    symbol, shapes = LARGE[name]()
    work = work_of(symbol, shapes)
    assert not work.training.inexact
    for level in FAST[:4]:
        step = build_step(make_parts(work), LEVELS[level](work, 0))
        outputs = sum(step.tensor(head).nbytes for head in step.heads[: step.arrays.outputs])
        assert 0 <= predict_step(step).peak_bytes - check_memory(step) <= outputs
