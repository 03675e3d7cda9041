"""The training step of a schedule is the network's, bit for bit; its memory, byte for byte."""

from __future__ import annotations

import re
from typing import Any

import memonger
import mxnet as mx
import pytest
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.training_step import TrainingStep, arena
from memonger.schedules.expand import build_step, make_parts

import networks
from operator_cases import ALL_CASES, SMALL_SHAPES, small_net
from zoo import LARGE, drawn
from planned import assert_alike
from alive import check_memory
from drawn_schedules import LEVELS, everything, work_of


FAST = [level for level in LEVELS if level != "everything"]


def test_operators_are_put_in_where_layouts_differ() -> None:
    work = work_of(*drawn(7))
    for mkldnn, expected in ((True, {"Pooling", "Reshape", "add_n", "max"}), (False, set())):
        parts = make_parts(work, mkldnn=mkldnn)
        steps = [build_step(parts, LEVELS[name](work, 0)) for name in FAST]
        assert set().union(*map(inserted, steps)) == expected
    assert make_parts(work_of(*networks.lstm(steps=5))).usual is None  # no convolutions


def inserted(step: TrainingStep) -> set[str]:
    return {k.op for k, source in zip(step.signatures, step.rows.source) if source < 0} - {"null"}


def seen_flat() -> Any:
    """Build views in whose gradients, computed in place, the blocks of a convolution survive."""
    S, layer = mx.sym, {"kernel": (3, 3), "pad": (1, 1), "num_filter": 8}
    x = S.BatchNorm(S.Convolution(S.Variable("data"), **layer), fix_gamma=False)
    x = S.reshape(S.tanh(S.reshape(x, (0, 0, -1))), (0, 0, 8, 8))
    return S.MakeLoss(S.mean(S.tanh(S.Convolution(x, **layer)))), {"data": (2, 4, 8, 8)}


def test_no_schedule_is_refused_for_layouts_where_there_are_none() -> None:
    work = work_of(*seen_flat())
    schedule = LEVELS["six levels"](work, 0)
    with pytest.raises(memonger.MemongerError, match="would use another layout") as caught:
        build_step(make_parts(work), schedule)
    names = set(re.findall("'(.*?)'", str(caught.value))) - {"marks"}
    assert names and names <= {node.name for node in work.training.graph.nodes}
    assert not inserted(build_step(make_parts(work, mkldnn=False), schedule))


def test_no_schedule_normalizes_blocks_along_rows() -> None:
    """MXNet's imperative interface cannot: ``Check failed: !is_view``."""
    x = mx.sym.tanh(mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=8))
    work = work_of(
        mx.sym.MakeLoss(mx.sym.BatchNorm(x, axis=3, name="norm")), {"data": (4, 3, 6, 6)}
    )
    with pytest.raises(memonger.MemongerError, match="another layout for an input of 'norm'"):
        build_step(make_parts(work), everything(work))


def test_no_step_copies_the_gradient_of_an_output() -> None:
    """Which MXNet's executor copies, though nothing writes over it."""
    net, shapes = mx.sym.Variable("data"), {"data": (64, 8)}
    for k in range(4):
        net = mx.sym.tanh(mx.sym.FullyConnected(net, num_hidden=8, name=f"fc{k}"))
    net = mx.sym.FullyConnected(net, num_hidden=1000, name="wide")
    step = build_step(make_parts(work_of(net, shapes)), everything(work_of(net, shapes)))
    assert "_identity_with_attr_like_rhs" not in step.ops
    assert step.arena_bytes < 64 * 1000 * 4  # of the output


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
                assert (plan.planner, plan.schedule) == ("no plan", None)
        assert len(memonger.frontier(net, shapes, how=how, patience=0.02)) == 1


def test_networks_without_a_schedule_are_refused_in_words() -> None:
    data = mx.sym.Variable("data")
    x = mx.sym.Embedding(data, input_dim=5, output_dim=2, sparse_grad=True)
    for symbol, words in ((data, "no operators"), (mx.sym.MakeLoss(x), "stored row by row")):
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
    with pytest.raises(memonger.MemongerError, match="would be wrong, with or without a plan"):
        memonger.plan(shared, shapes, grad_req={"bias": "write"}, how="marks")


@pytest.mark.parametrize("request_", ["write", "add"])
def test_a_network_in_which_no_gradient_is_written_is_planned(request_: str) -> None:
    """MKLDNN leaves out the only gradient, and a BlockGrad makes it zeros."""
    shapes = {"data": (64, 4)}
    x = mx.sym.FullyConnected(mx.sym.BlockGrad(deep(mx.sym.var("data"))), num_hidden=4, name="fc")
    for wanted, y in (("fc_bias", deep(x)), ("fc_weight", mx.sym.BlockGrad(deep(x)))):
        net = mx.sym.MakeLoss(mx.sym.mean(y))
        requests = {n: request_ if n == wanted else "null" for n in net.list_arguments()}
        for how in ("schedule", "marks"):
            plan = memonger.plan(net, shapes, grad_req=requests, patience=0.02, how=how)
            assert (plan.pool_bytes < plan.unplanned_bytes) == (wanted == "fc_bias")
            assert_alike(net, plan.symbol, shapes, grad_req=requests)


def deep(x: Any) -> Any:
    for _ in range(6):
        x = mx.sym.tanh(x * 1.1)
    return x


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
        assert 0 <= arena(step).peak_bytes - check_memory(step) <= outputs
