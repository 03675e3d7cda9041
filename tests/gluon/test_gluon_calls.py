"""Planned Gluon blocks: what the calls take and refuse, and what becomes of a block."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import memonger
import mxnet as mx
from memonger import MemongerError
from memonger.gluon import plan, plan_of, unplan
from mxnet import autograd, gluon
from mxnet.gluon import nn

from blocks import OPERATORS, PATIENCE, TwoInputs, batch, different, initialized
from blocks import layers, mlp, planned, seed, taught, trainer
from planned import HOWS


# How it is planned


def symbol_block() -> Any:
    x = mx.sym.var("image")
    net = gluon.SymbolBlock(layers("net_")(x), [x])
    net.initialize()
    return net


def double() -> Any:
    net = mlp()
    net.cast("float64")
    return net


@pytest.mark.parametrize(
    ("make", "shapes", "types"),
    [
        (mlp, {"data": (16, 20)}, {"data": "float32"}),
        (double, {"data": (16, 20)}, {"data": "float64"}),
        (symbol_block, {"image": (16, 20)}, {}),
        (lambda: initialized(TwoInputs()), {"data0": (16, 20), "data1": (16, 20)}, {}),
    ],
)
def test_a_plan_has_the_inputs_as_gluon_names_them(make: Any, shapes: Any, types: Any) -> None:
    plan = plan_of(planned(make(), *shapes.values()))
    spec = plan.request.spec
    assert plan.recomputed
    assert {name: spec.shapes[name] for name in shapes} == shapes
    assert {name: spec.types[name] for name in types} == types


def test_one_plan_serves_calls_of_all_shapes() -> None:
    net = planned(mlp(), (256, 20))
    plan = plan_of(net)
    taught(net, 1)
    assert plan_of(net) is plan


def test_a_plan_is_of_what_is_behind_sparse_gradients() -> None:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Embedding(20, 8, sparse_grad=True), layers("layers_"))
    plan = plan_of(planned(initialized(net), (16, 4)))
    assert plan.recomputed
    assert plan.request.spec.shapes["net_embedding0_fwd_output0"] == (16, 4, 8)
    assert "net_embedding0_weight" not in plan.symbol.list_arguments()


def test_a_block_of_mx_np_returns_its_arrays() -> None:
    with mx.util.np_shape(), mx.util.np_array():
        net = planned(mlp())
        x = mx.np.ones((16, 20))
        with autograd.record():
            assert isinstance(net(x), mx.np.ndarray)
        assert plan_of(net).recomputed
        assert isinstance(net(x), mx.np.ndarray)


def chain(depth: int = 24) -> Any:
    """Build layers whose results take far more than their parameters."""
    net = nn.HybridSequential(prefix="chain_")
    with net.name_scope():
        for _ in range(depth):
            net.add(nn.Dense(8, activation="relu"))
    return initialized(net)


def test_a_block_is_planned_by_marks_if_asked_and_with_a_budget_by_a_schedule() -> None:
    marks = plan_of(planned(chain(), (1024, 8), how="marks"))
    assert marks.schedule is None and marks.recomputed
    budget = 0.9 * marks.pool_bytes / marks.unplanned_bytes
    with pytest.raises(memonger.BudgetError):
        planned(chain(), (1024, 8), budget=budget, how="marks")
    assert plan_of(planned(chain(), (1024, 8), budget=budget)).schedule is not None


def test_a_schedule_takes_what_it_takes_under_module() -> None:
    """And it is what a block gets by default."""
    options: Any = {"how": "schedule", "work": 2.0}
    net = planned(chain(), (1024, 8), how=None)
    plan = plan_of(net)
    symbol = net(mx.sym.var("data"))
    other = memonger.plan(symbol, patience=PATIENCE, data=(1024, 8), **options)
    assert plan.schedule is not None and plan.pool_bytes == other.pool_bytes


def test_a_budget_that_no_plan_fits_is_refused_at_the_first_call() -> None:
    net = planned(mlp(), budget=100)
    with pytest.raises(memonger.BudgetError, match="the smallest needs"), autograd.record():
        net(batch(0)[0])


def test_a_plan_that_saves_nothing_leaves_the_block_as_it_is() -> None:
    net, other = (initialized(nn.Dense(4, prefix="net_")) for _ in range(2))
    other.hybridize()
    plan = plan_of(planned(net, (16, 20)))
    assert not plan.recomputed
    assert taught(net).keys() == taught(other).keys()


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_plan_serves_no_more_gradients_than_it_was_made_for(how: str) -> None:
    net, (x, _) = planned(mlp(drop=0), **HOWS[how]), batch(0, 256)
    parameters = net.collect_params("(?!net_dense5_).*")
    plans = []
    for request, wants in [("null", False), ("null", True), ("write", True), ("write", False)] * 2:
        parameters.setattr("grad_req", request)
        data = x.copy()
        if wants:
            data.attach_grad()
        with autograd.record():
            net(data).backward()
        plans.append(plan_of(net))
    head, whole = plans[:2]
    assert not head.recomputed and whole.recomputed
    assert whole.request.grad_req["data"] == "write"
    assert plans == 2 * [head, whole, whole, whole]


def test_a_block_of_which_nothing_is_trained_is_planned_for_its_input() -> None:
    net, (x, _) = mlp(drop=0), batch(0)
    net.collect_params().setattr("grad_req", "null")
    planned(net)
    with autograd.record():
        net(x)  # no gradient passes
    with pytest.raises(MemongerError, match="no plan before its first call"):
        plan_of(net)
    x.attach_grad()
    with autograd.record():
        net(x).backward()
    assert plan_of(net).recomputed and x.grad.asnumpy().any()


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
    marks = plan_of(planned(chain(), (1024, 8)))
    limit = (marks.pool_bytes + marks.unplanned_bytes) // 2
    net = planned(chain(), how="marks", budget=limit)
    plans = [called(net, size) for size in (2, 1024, 1000, 1048)]
    assert [bool(plan.recomputed) for plan in plans] == [False, True, True, True]
    assert plans[1] is plans[2] is not plans[3]
    assert all(plan.pool_bytes <= limit for plan in plans)
    with pytest.raises(memonger.BudgetError, match="the smallest needs"):
        called(net, 10240)


def test_a_block_has_no_plan_after_unplan() -> None:
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
        for request in ("null", "write"):  # Gluon's copies have gradients that are not on tape
            twin.collect_params("(?!.*running).*").setattr("grad_req", request)
    with pytest.raises(MemongerError, match="has no plan"):
        plan_of(twins[0])
    left = taught(net)
    assert [different(taught(twin), left) for twin in twins] == [[], []]
    assert plan_of(twins[1]).recomputed


# What cannot be planned


ARGMAX = nn.HybridLambda(lambda F, x: F.argmax(x, axis=-1))


class Looped(nn.HybridBlock):
    """Control flow."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        y, _ = F.contrib.foreach(lambda a, s: (F.tanh(a) + s, s + a), x, F.sum(x, axis=0) * 0)
        return F.mean(y, axis=0)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: [nn.Dense(9), ARGMAX, nn.Embedding(9, 8, sparse_grad=True)], {}, "dense0_fwd"),
        (lambda: [nn.Embedding(20, 8, sparse_grad=True)], {}, "all its operators"),
        (lambda: [layers("one_"), Looped()], HOWS["schedule"], "_foreach"),
        # From its output CachedOp computes the gradient of its slope otherwise than executors.
        *((lambda: [layers("one_"), nn.PReLU()], HOWS[how], "PReLU") for how in HOWS),
    ],
)
def test_what_cannot_be_planned_trains_as_before_and_warns_once(
    make: Any, options: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    left = []
    for prepare in (lambda net: net.hybridize(), lambda net: planned(net, **options)):
        seed()
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(*make())
        prepare(initialized(net))
        training = trainer(net)
        for k in range(3):
            with autograd.record():
                loss = (net(batch(k)[0].abs()) ** 2).sum()
            loss.backward()
            training.step(16)
            if k == 1:
                net.hybridize()
        mx.nd.waitall()
        left.append({name: p.data().asnumpy() for name, p in net.collect_params().items()})
    assert different(*left) == []
    warnings = [m for m in caplog.messages if "trains without a plan" in m]
    assert len(warnings) == 1 and reason in warnings[0], caplog.text
    with pytest.raises(MemongerError, match="trains without a plan"):
        plan_of(net)


def test_a_call_at_fault_raises_mxnets_error_and_later_calls_are_planned() -> None:
    net = planned(mlp())
    wrong, right = batch(0, features=7)[0], batch(0)[0]
    taught(net, 1)
    with pytest.raises(mx.MXNetError), autograd.record():
        net(wrong)
    with autograd.record():
        net(right)
    assert plan_of(net).recomputed


def test_an_input_on_another_device_raises_what_mxnet_raises() -> None:
    net, x = planned(mlp()), batch(0)[0]
    for _ in range(2):
        with pytest.raises(mx.MXNetError, match="live on the same context"), autograd.record():
            net(x.as_in_context(mx.cpu(1)))
        with autograd.record():
            net(x)
    assert plan_of(net).recomputed


def test_options_of_hybridize_are_handed_to_it() -> None:
    flags: dict[str, Any] = {"active": True, "static_alloc": True, "static_shape": True}
    flags["inline_limit"] = 4
    flags = {**flags, "forward_bulk_size": 8, "backward_bulk_size": 8, "clear": True}
    net, other = plan(mlp(), **flags), mlp()
    other.hybridize(**flags)
    assert net._flags == other._flags
    assert different(taught(net), taught(other)) == []
    assert plan_of(net).recomputed
    with pytest.raises(MemongerError, match=r"since hybridize\(False\)"):
        plan_of(plan(mlp(), active=False))
    with pytest.raises(MemongerError, match="'static_aloc'; did you mean 'static_alloc'"):
        plan(net, static_aloc=True)  # type: ignore[call-arg]


# Bad input

wrong: Any = plan  # takes what a type checker would refuse


class Plain(gluon.Block):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan(Plain()), r"\(Plain\) is a Block that cannot be hybridized; make it"),
        (lambda: plan(nn.Sequential()), "HybridSequential for Sequential"),
        (lambda: plan(mx.sym.var("x")), "plan it with memonger.plan"),
        (lambda: plan(3), "net must be an mx.gluon.HybridBlock, not int 3"),
        (lambda: unplan(3), "net must be an mx.gluon.HybridBlock"),
        (lambda: plan_of(mlp()), "has no plan; make one with memonger.gluon.plan"),
        (lambda: plan_of(plan(mlp())), "no plan before its first call"),
        (lambda: wrong(mlp(), data=(16, 20)), "no data=; the plan is made at the first call"),
        (lambda: plan(mlp(), {"data": (16, 20)}), "no shapes=; the plan is made at the first"),
        (lambda: wrong(mlp(), type_dict={}), "no type_dict=; the plan is made at the first call"),
        (lambda: wrong(mlp(), patienc=2), "unknown option 'patienc'; did you mean 'patience'"),
        (lambda: wrong(mlp(), grad_req="add"), "set it on the parameters"),
        (lambda: wrong(mlp(), devices=2), "each device's part"),
    ],
)
def test_bad_input_is_named_with_its_remedy(call: Any, message: str) -> None:
    with pytest.raises(MemongerError, match=message):
        call()


# Between calls


def test_a_plan_is_made_anew_after_hybridize() -> None:
    net = planned(mlp())
    taught(net)
    plan = plan_of(net)
    net.hybridize(False)
    taught(net, 1)
    with pytest.raises(MemongerError, match=r"since hybridize\(False\); call net.hybridize\(\)"):
        plan_of(net)
    net.hybridize()
    taught(net, 1)
    assert plan_of(net) is not plan and plan_of(net).recomputed == plan.recomputed


def test_hooks_of_operators_are_called_in_inference_only() -> None:
    net, calls = planned(mlp()), []
    net.register_op_hook(lambda *call: calls.append(call))
    taught(net)
    assert plan_of(net).recomputed and not calls
    net(batch(0)[0])
    assert len(calls) == OPERATORS
