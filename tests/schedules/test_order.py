"""What moves a state does so in MXNet's order, whatever gradients are wanted.

MXNet's own executor takes operators that move a state for ones that read it, so that two of them
may overtake each other. An engine that waits for each operator runs them in the order of the graph.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Iterator

import memonger
import mxnet as mx
import pytest
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.schedule import adapt, check

from drawn_schedules import LEVELS, everything, nested, work_of
from planned import elsewhere, forward

S = mx.sym
var = functools.lru_cache(None)(S.var)  # of one name there is one variable
SHAPES = dict.fromkeys("abc", (6, 5))


class Tracing(mx.operator.CustomOp):
    """An identity that moves its auxiliary state in the backward pass, with momentum."""

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0])

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        aux[0][:] = 0.5 * aux[0] + out_data[0].sum()
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("memonger_test_tracing")
class TracingProp(mx.operator.CustomOpProp):
    """Properties of `Tracing`."""

    def list_auxiliary_states(self) -> list[str]:
        return ["trace"]

    def infer_shape(self, in_shape: Any) -> Any:
        return in_shape, in_shape, [(1,)]

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Tracing:
        return Tracing()


def dense(x: Any, name: str) -> Any:
    weight, bias = var(name + "_weight"), var(name + "_bias")
    return S.FullyConnected(x, weight, bias, num_hidden=5)


def normalized(x: Any, name: str, **options: Any) -> Any:
    names = "gamma", "beta", "moving_mean", "moving_var"
    states = [var(f"{name}_{state}") for state in names]
    return S.BatchNorm(x, *states, fix_gamma=False, momentum=0.7, **options)


def body(x: Any, layers: int = 1) -> Any:
    for k in range(layers):
        x = S.tanh(normalized(dense(x, f"fc{k}"), f"bn{k}"))
    return x


def called(calls: int, layers: int = 1, outputs: int = 0) -> Any:
    """Call the same layers on several inputs, the last of which has come further."""
    xs = [var(name) for name in "abc"[:calls]]
    deeper = [*xs[:-1], S.tanh(S.tanh(xs[-1] * 2))]
    total = dense(S.add_n(*(body(x, layers) for x in deeper)), "out")
    gates = S.slice_axis(total, axis=1, begin=0, end=1)
    return S.Group([total, *(S.broadcast_mul(S.tanh(x), gates) for x in xs[:outputs])])


def traced() -> Any:
    trace = var("trace")
    one, other = (
        S.tanh(S.Custom(dense(var(name), "fc"), trace, op_type="memonger_test_tracing"))
        for name in "ab"
    )
    return dense(one + other, "out")


def sparse() -> Any:
    one, other = (
        S.IdentityAttachKLSparseReg(
            S.sigmoid(dense(var(name), "fc")), moving_avg=var("average"), momentum=0.3
        )
        for name in "ab"
    )
    return dense(one * other, "out")


def read_elsewhere() -> Any:
    """Read statistics that another operator moves, by two operators that must not run again."""
    a, b, c = (var(name) for name in "abc")
    fixed = normalized(dense(b, "fc0"), "bn0", use_global_stats=True)
    scaled = S.broadcast_mul(dense(c, "fc0"), var("bn0_moving_var"))
    return dense(S.tanh(body(a)) + S.tanh(S.tanh(fixed)) + S.tanh(S.tanh(scaled)), "out")


NETWORKS: dict[str, Callable[[], Any]] = {
    "a BatchNorm, two calls": lambda: called(2),
    "an output more": lambda: called(2, outputs=1),
    "two BatchNorms, three calls, three outputs more": lambda: called(3, layers=2, outputs=3),
    "a Custom with momentum": traced,
    "an average of activations": sparse,
    "statistics that others read": read_elsewhere,
}


def all_requests(symbol: Any) -> Iterator[dict[str, str]]:
    """List requests for gradients of any of the inputs and of few, all or none of the others."""
    names = symbol.list_arguments()
    inputs = [name for name in names if name in SHAPES]
    others = [name for name in names if name not in SHAPES]
    for few in (others, others[2:3], []):
        for count in range(len(inputs) + 1):
            for chosen in itertools.combinations(inputs, count):
                wanted = {*few, *chosen}
                if wanted:
                    yield {name: "write" if name in wanted else "null" for name in names}


def train_for_all_requests(name: str) -> list[dict[str, str]]:
    """Train by schedules made for all gradients and for those wanted; return what differs."""
    symbol = NETWORKS[name]()
    shapes = {n: shape for n, shape in SHAPES.items() if n in symbol.list_arguments()}
    work = work_of(symbol, shapes, symbol.list_arguments())
    of_all = [draw(work, 3) for draw in LEVELS.values()]
    differ = []
    for k, requests in enumerate(all_requests(symbol)):
        wanted = [n for n, request in requests.items() if request != "null"]
        own = nested(work_of(symbol, shapes, wanted), 3, k, 0.9)
        planned = scheduled(symbol, [own, of_all[k % len(of_all)]][k % 2])
        if not memonger.check(symbol, planned, shapes, grad_req=requests, steps=1):
            differ.append(requests)
    return differ


def trained_by_a_plan() -> tuple[int, bool]:
    symbol, shapes = called(2, layers=2), {"a": (64, 5), "b": (64, 5)}
    plan = memonger.plan(symbol, shapes, how="schedule", patience=0.02, grad_req="write")
    saved = plan.unplanned_bytes - plan.pool_bytes
    return saved, bool(memonger.check(symbol, plan.symbol, shapes, grad_req="write", steps=1))


def with_an_engine_that_waits() -> tuple[dict[str, list[dict[str, str]]], int, bool]:
    return ({name: train_for_all_requests(name) for name in NETWORKS}, *trained_by_a_plan())


@pytest.mark.late
def test_states_move_in_mxnets_order() -> None:
    """By drawn schedules for all requests of gradients, and by a plan."""
    differ, saved, same = elsewhere(with_an_engine_that_waits, MXNET_ENGINE_TYPE="NaiveEngine")[0]
    assert differ == {name: [] for name in NETWORKS}
    assert saved > 0 and same


def test_the_order_follows_the_gradients_that_are_wanted() -> None:
    symbol, shapes = called(2), {"a": (6, 5), "b": (6, 5)}
    graph = forward(symbol, shapes)
    first, second = (x for x in graph.operators if graph.nodes[x].op == "BatchNorm")

    def order(*wanted: str) -> list[int]:
        gradients = work_of(symbol, shapes, wanted).gradients
        return [x for x in gradients if x in (first, second)]

    assert order("a", "b") == order("a", "fc0_weight") == [first, second]
    assert order("fc0_weight") == order("b", "fc0_weight") == [second, first]
    assert order("b") == [second]


def test_what_is_computed_again_for_a_gradient_moves_with_it() -> None:
    symbol, shapes = called(2, layers=2), {"a": (6, 5), "b": (6, 5)}
    parameters = [n for n in symbol.list_arguments() if n not in shapes]
    one, other = (work_of(symbol, shapes, [*inputs, *parameters]) for inputs in ("b", "ab"))
    assert one.gradients != other.gradients
    assert sorted(one.gradients) == sorted(other.gradients)
    schedule = everything(one)
    adapted = adapt(other, schedule)
    check(other, adapted)
    assert sorted(adapted.operations) == sorted(schedule.operations)
    assert adapt(one, adapted).operations.tolist() == schedule.operations.tolist()
    assert adapt(one, schedule).operations.tolist() == schedule.operations.tolist()


def test_what_reads_statistics_that_another_operator_moves_runs_once() -> None:
    graph = forward(read_elsewhere(), SHAPES)
    once = [graph.nodes[x] for x in graph.operators if graph.why_kept(x) is not None]
    assert [node.op for node in once] == ["BatchNorm", "broadcast_mul"]
    assert once[0].attrs["use_global_stats"] == "True"
