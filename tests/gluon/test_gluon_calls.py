"""Planned Gluon blocks: what the calls take and refuse, and what becomes of a block."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from typing import Any

import pytest

import memonger
import mxnet as mx
from memonger import MemongerError
from memonger.gluon import plan, plan_of, unplan
from mxnet import autograd, gluon
from mxnet.gluon import nn

from blocks import HOWS, LOSS, PATIENCE, TwoInputs, batch, different, initialized, layers
from blocks import mlp, planned, seed, taught, trainer


# How it is planned


def test_the_plan_is_made_now_where_shapes_are_given() -> None:
    net = mlp()
    assert planned(net, data=(16, 20)) is net
    found = plan_of(net)
    assert found.recomputed and found.request.spec.shapes["data"] == (16, 20)
    seed()
    with autograd.record():
        net(batch(0)[0])
    assert plan_of(net) is found


def test_several_inputs_are_named_as_gluon_names_them() -> None:
    net = initialized(TwoInputs())
    planned(net, {"data0": (16, 20)}, data1=(16, 20))
    assert plan_of(net).recomputed


def test_a_symbol_block_is_planned_by_the_names_of_its_inputs() -> None:
    x = mx.sym.var("image")
    net = gluon.SymbolBlock(layers("net_")(x), [x])
    net.initialize()
    assert plan_of(planned(net, image=(16, 20))).recomputed
    with pytest.raises(MemongerError, match="'imag'.*did you mean 'image'"):
        plan(net, imag=(16, 20))


def test_the_types_are_those_of_a_net_that_was_cast() -> None:
    net = mlp()
    net.cast("float16")
    assert plan_of(planned(net, data=(16, 20))).request.spec.types["data"] == "float16"
    assert plan_of(planned(mlp(), data=(16, 20), type_dict={"data": "float32"})).recomputed


def chain() -> Any:
    """Layers whose results take far more than their parameters."""
    net = nn.HybridSequential(prefix="chain_")
    with net.name_scope():
        for _ in range(40):
            net.add(nn.Dense(8, activation="relu"))
    return initialized(net)


def test_marks_by_default_and_both_ways_with_a_budget() -> None:
    marks = plan_of(planned(chain(), data=(1024, 8)))
    assert marks.schedule is None and marks.added_time is None
    budget = 0.9 * marks.pool_bytes / marks.unplanned_bytes
    with pytest.raises(memonger.BudgetError):
        planned(chain(), data=(1024, 8), budget=budget, how="marks")
    assert plan_of(planned(chain(), data=(1024, 8), budget=budget)).schedule is not None


def test_a_schedule_takes_what_it_takes_under_module() -> None:
    options: Any = {"data": (1024, 8), "how": "schedule", "work": 2.0}
    net = planned(chain(), **options)
    found = plan_of(net)
    other = memonger.plan(net(mx.sym.var("data")), patience=PATIENCE, **options)
    assert found.schedule is not None and found.pool_bytes == other.pool_bytes


def test_a_budget_that_no_plan_fits() -> None:
    with pytest.raises(memonger.BudgetError, match="the smallest needs"):
        planned(mlp(), data=(16, 20), budget=100)
    net = planned(mlp(), budget=100)
    with pytest.raises(memonger.BudgetError, match="the smallest needs"), autograd.record():
        net(batch(0)[0])


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_budget_error_has_no_names_but_those_of_the_block(how: str) -> None:
    dense = nn.Dense(512, prefix="net_", activation="tanh")
    net = planned(initialized(dense), **{**HOWS[how], "budget": 1})
    with pytest.raises(memonger.BudgetError) as caught, autograd.record():
        net(batch(0, 1024)[0])
    names = net(mx.sym.var("data0")).get_internals().list_outputs()
    told = re.findall("'(.*?)'", str(caught.value))
    assert told and all(name in names or f"{name}_output" in names for name in told)


def test_a_plan_that_saves_nothing_leaves_the_block_as_it_is() -> None:
    net, other = (initialized(nn.Dense(4, prefix="net_")) for _ in range(2))
    other.hybridize()
    found = plan_of(planned(net, data=(16, 20)))
    assert not found.recomputed
    assert taught(net).keys() == taught(other).keys()


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_plan_serves_no_more_gradients_than_it_was_made_for(how: str) -> None:
    net, (x, _) = planned(mlp(drop=0), **HOWS[how]), batch(0, 256)
    parameters = net.collect_params("(?!net_dense8_).*")
    found = []
    for request, wants in [("null", False), ("null", True), ("write", True), ("write", False)] * 2:
        parameters.setattr("grad_req", request)
        each = x.copy()
        if wants:
            each.attach_grad()
        with autograd.record():
            net(each).backward()
        found.append(plan_of(net))
    head, whole = found[:2]
    assert not head.recomputed and whole.recomputed
    assert whole.request.grad_req["data"] == "write"
    assert found == 2 * [head, whole, whole, whole]


def test_a_block_of_which_nothing_is_trained_is_planned_for_its_input() -> None:
    net, (x, _) = mlp(drop=0), batch(0)
    net.collect_params().setattr("grad_req", "null")
    found = plan_of(planned(net, data=(16, 20)))
    assert found.recomputed
    with autograd.record():
        net(x)  # no gradient passes
    x.attach_grad()
    with autograd.record():
        net(x).backward()
    assert plan_of(net) is found and x.grad.asnumpy().any()


def called(net: Any, size: int) -> memonger.Plan:
    with autograd.record():
        net(mx.nd.ones((size, 8))).backward()
    return plan_of(net)


def test_a_small_batch_decides_nothing_for_larger_ones() -> None:
    """Neither that nothing is saved, nor what fits into so many bytes."""
    net = planned(chain(), how="schedule", work=2.0)
    small, large = called(net, 2), called(net, 1024)
    assert not small.recomputed and large.recomputed
    assert called(net, 512) is large
    marks = plan_of(planned(chain(), data=(1024, 8)))
    limit = (marks.pool_bytes + marks.unplanned_bytes) // 2
    net = planned(chain(), how="marks", budget=limit)
    found = [called(net, size) for size in (2, 1024, 1000, 1048)]
    assert [bool(each.recomputed) for each in found] == [False, True, True, True]
    assert found[1] is found[2] is not found[3]
    assert all(each.pool_bytes <= limit for each in found)
    with pytest.raises(memonger.BudgetError, match="the smallest needs"):
        called(net, 10240)


def test_unplanned_it_trains_as_before() -> None:
    net = planned(mlp())
    taught(net)
    assert unplan(net) is net and unplan(net) is net
    with pytest.raises(MemongerError, match="has no plan"):
        plan_of(net)
    with autograd.record():
        net(batch(0)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_and_pickles_train_without_a_plan(copied: Any) -> None:
    net = planned(mlp())
    taught(net, 2)
    twins = copied(net), planned(copied(net))
    for twin in twins:
        for parameter in twin.collect_params().values():
            if parameter.grad_req != "null":  # Gluon's copies have gradients that are not on tape
                parameter.grad_req = "null"
                parameter.grad_req = "write"
    with pytest.raises(MemongerError, match="has no plan"):
        plan_of(twins[0])
    left = taught(net)
    assert [different(taught(twin), left) for twin in twins] == [[], []]
    assert plan_of(twins[1]).recomputed


def test_a_net_that_is_gone_takes_its_plan_with_it() -> None:
    import weakref

    net = planned(mlp())
    taught(net)
    mx.nd.waitall()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


# What cannot be planned


def sparse() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Embedding(20, 8, sparse_grad=True), nn.Dense(10))
    return net


class Looped(nn.HybridBlock):
    """Control flow."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        made, _ = F.contrib.foreach(lambda a, s: (F.tanh(a) + s, s + a), x, F.sum(x, axis=0) * 0)
        return F.mean(made, axis=0)


def made(kind: str) -> tuple[Any, dict[str, Any], str]:
    if kind == "sparse":
        return sparse(), {}, "sparse"
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(layers("one_"), Looped())
    return net, HOWS["schedule"], "_foreach"


@pytest.mark.parametrize("kind", ["sparse", "loop"])
def test_what_cannot_be_planned_warns_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for plans in (False, True):
        seed()
        net, options, reason = made(kind)
        initialized(net)
        net.hybridize()
        if plans:
            planned(net, **options)
        training = trainer(net)
        for k in range(3):
            x, y = batch(k)
            x = x.abs() if kind == "sparse" else x
            with autograd.record():
                out = net(x)
                loss = (out**2).sum() if kind == "loop" else LOSS(out, y)
            loss.backward()
            training.step(16)
            if k == 1:
                net.hybridize()
        mx.nd.waitall()
        data = {k: v.data().asnumpy() for k, v in net.collect_params().items()}
        results.append(data)
    assert different(*results) == []
    told = [r.getMessage() for r in caplog.records if "trains without a plan" in r.getMessage()]
    assert len(told) == 1 and reason in told[0], caplog.text
    with pytest.raises(MemongerError, match="trains without a plan"):
        plan_of(net)


def test_a_call_at_fault_raises_as_without_a_plan_and_is_forgiven() -> None:
    net = planned(mlp())
    wrong, right = batch(0, features=7)[0], batch(0)[0]
    taught(net, 1)
    with pytest.raises(mx.MXNetError), autograd.record():
        net(wrong)
    with autograd.record():
        net(right)
    assert plan_of(net).recomputed


def test_an_input_on_another_device() -> None:
    net, x = planned(mlp()), batch(0)[0]
    for _ in range(2):
        told = r"'data' is on cpu\(1\).* parameters are on cpu\(0\).*as_in_context\(mx\.cpu\(0\)\)"
        with pytest.raises(MemongerError, match=told), autograd.record():
            net(x.as_in_context(mx.cpu(1)))
        with autograd.record():
            net(x)
    assert plan_of(net).recomputed


def test_it_takes_what_hybridize_takes() -> None:
    flags = {"active": True, "static_alloc": True, "static_shape": True, "inline_limit": 4}
    flags = {**flags, "forward_bulk_size": 8, "backward_bulk_size": 8, "clear": True}
    net, other = plan(mlp(), **flags), mlp()
    other.hybridize(**flags)
    assert net._flags == other._flags
    assert different(taught(net), taught(other)) == []
    assert plan_of(net).recomputed
    net = plan(mlp(), data=(16, 20), active=False)
    with pytest.raises(MemongerError, match=r"since hybridize\(False\)"):
        plan_of(net)
    with pytest.raises(MemongerError, match="'static_aloc'; did you mean 'static_alloc'"):
        plan(net, static_aloc=True)


# Bad input


class Plain(gluon.Block):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan(Plain()), r"\(Plain\) is a Block that cannot be hybridized; make it"),
        (lambda: plan(nn.Sequential()), "HybridSequential for Sequential"),
        (lambda: plan(mx.sym.var("x")), "plan it with memonger.plan"),
        (lambda: plan(3), "must be an mx.gluon.HybridBlock, not int 3"),
        (lambda: unplan(3), "must be an mx.gluon.HybridBlock"),
        (lambda: plan_of(mlp()), "has no plan; make one with memonger.gluon.plan"),
        (lambda: plan_of(plan(mlp())), "no plan before its first call"),
        (lambda: plan(layers("net_"), data=(16, 20)), "'net_dense0_weight' is not initialized"),
        (lambda: plan(mlp(), dat=(16, 20)), "'dat', which is no input.*did you mean 'data'"),
        (lambda: plan(mlp(), data=(16, 0)), "at least 1"),
        (lambda: plan(initialized(TwoInputs()), data=(16, 20)), "does not take inputs of shapes"),
        (lambda: plan(mlp(), {"data0": (16, 20), "data1": (16, 20)}), "does not take inputs"),
        (lambda: plan(mlp(), patienc=2), "unknown option 'patienc'; did you mean 'patience'"),
        (lambda: plan(mlp(), patience=0), "patience=0 must be"),
        (lambda: plan(mlp(), how="marx"), "unknown way"),
        (lambda: plan(mlp(), how="auto"), "needs budget="),
        (lambda: plan(mlp(), budget="6 potatoes"), "budget="),
        (lambda: plan(mlp(), grad_req="add"), "set it on the parameters"),
        (lambda: plan(mlp(), devices=2), "each device's part"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(MemongerError, match=message):
        call()


def test_shapes_that_do_not_fit_parameters_that_have_theirs() -> None:
    net = mlp()
    net(batch(0)[0])
    with pytest.raises(MemongerError, match="does not take inputs of shapes"):
        plan(net, data=(16, 21))
    with pytest.raises(MemongerError, match="has no plan"):
        plan_of(net)


# Between calls


def test_a_plan_is_made_anew_after_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    net = planned(mlp())
    taught(net)
    found = plan_of(net)
    net.hybridize(False)
    net.summary(batch(0)[0])
    assert "Unique parameters in model: 9418" in capsys.readouterr().out
    taught(net)
    with pytest.raises(MemongerError, match=r"since hybridize\(False\); call net.hybridize\(\)"):
        plan_of(net)
    net.hybridize()
    taught(net)
    assert plan_of(net) is not found and plan_of(net).recomputed == found.recomputed


def test_hooks_of_operators_are_called_in_inference_only() -> None:
    net, told = planned(mlp()), []
    net.register_op_hook(lambda *about: told.append(about))
    taught(net)
    assert plan_of(net).recomputed and not told
    net(batch(0)[0])
    assert len(told) == 33
