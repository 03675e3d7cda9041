"""One table: what is trained by marks, by schedules and by Gluon, and in which memory.

Its rows are operators, each alone, inside a network, and behind a convolution, and networks.
Columns compare the bits with those without a plan, and the memory taken with the memory predicted.
``tests/gluon/test_gluon_bits.py`` trains blocks in all the ways of Gluon.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.schedules.training_step import arena
from memonger.costs.bind import bind, has_mkldnn
from memonger.costs.pool import pool
from memonger.graph import marks
from memonger.graph.operators.recompute import ANYWHERE, CPU
from memonger.graph.training import training_graph
from memonger.planners.marks.rules import Rules
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import step_for
from memonger.schedules.layouts import LayoutMismatch
from memonger.schedules.schedule import check
from memonger.support.mxnet import environment

import modules
from alive import check_memory
from blocks import Arrays, Prepare
from drawn_schedules import LEVELS, work_of
from operator_cases import ALL_CASES, BLOCKED_SHAPES, CASES, PLANNED_SHAPES, READERS
from operator_cases import SMALL_SHAPES, blocked_net, inner, planned_net, small_net
from planned import as_module, assert_alike, assert_bound, forward, is_trainable, positive
from planned import rules_of, run_code
from scenarios import train, unlike_plain
from zoo import DETECTION, OPAQUE, OUTPUTS, TINY, Network, drawn

S = mx.sym
ON_CPU: frozenset[str] = frozenset((CPU,))


class Row(NamedTuple):
    """A network with its shapes, and how it is trained."""

    build: Callable[[], Any]
    #: What is marked beside drawn shares of all that may be: nodes of these names.
    alone: Callable[[Any], Iterable[str]] | None = None
    shares: tuple[float, ...] = (1, 0.5)
    #: The kinds of schedules, and those by which gradients are added.
    levels: tuple[str, ...] = tuple(LEVELS)
    added: str = ""
    steps: int = 2
    types: dict[str, str] | None = None
    values: Callable[[Any, Any], Any] = lambda symbol, shapes: None
    may_be_refused: bool = False

    def options(self, symbol: Any, shapes: Any) -> dict[str, Any]:
        """Return those of ``memonger.check``."""
        values = self.values(symbol, shapes)
        return {"steps": self.steps, "type_dict": self.types, "values": values}


# -- the rows -----------------------------------------------------------------------------------

#: Control flow is no part of a schedule, and np_vstack writes into no array.
KNOWN = sorted(set(ALL_CASES) - {"foreach", "np_vstack"})
#: With a gradient in place that has several results, that is laid out, or that is declared to be
#: the one that it reads; and softmax, which must overwrite blocks.
TELLING = """
LeakyReLU_prelu LeakyReLU_elu hard_sigmoid elemwise_sub add_n broadcast_mul FullyConnected
SliceChannel_all softmax
""".split()
#: Of these operators the layout in which MKLDNN finds their input decides the last bits, or more.
LAID_OUT = ["BatchNorm", "BatchNorm_axis", "Convolution_3d", "Deconvolution", "Embedding_plus"]
LAID_OUT += ["FullyConnected", "Pooling_max", "log_softmax", "slice", "ten_uses", "unravel_index"]
#: Gradients of these are added by other operators than most, or they move states.
ADDED = """
BatchNorm_v1 SyncBatchNorm SyncBatchNorm_mean BatchNormWithReLU LeakyReLU_prelu broadcast_greater
""".split()


def operator(name: str, place: str, levels: tuple[str, ...], **more: Any) -> Row:
    """Return the row of an operator: ``place`` is 'alone', 'inside' or a reader."""

    def build() -> Any:
        case = ALL_CASES[name]
        if place == "alone":
            return small_net(case), SMALL_SHAPES
        if place == "inside":
            return planned_net(case), PLANNED_SHAPES
        return blocked_net(case, place), BLOCKED_SHAPES

    return Row(build, levels=levels, values=positive, **more)


QUICK, SLOW, BY_HAND = (), pytest.mark.slow, pytest.mark.exhaustive


def operators() -> Iterator[tuple[str, Row, Any]]:
    """Yield the name of each row, the row, and its mark.

    Alone all operators are tried in CI, few of them quickly; elsewhere those that show more.
    """
    for k, name in enumerate(KNOWN):
        added = ["one level"] * (k % 3 == 0 or name in ADDED)
        levels = ("everything", *added)
        row = operator(name, "alone", levels, alone=inner, shares=(1,), added="".join(added))
        mark = QUICK if k % 12 == 0 or name in ADDED or name in TELLING else SLOW
        yield f"{name} alone", row, mark if name in CASES else BY_HAND
        mark = QUICK if name in LAID_OUT or name in TELLING else BY_HAND
        yield f"{name} inside", operator(name, "inside", ("three levels", "six levels")), mark
        # From a shape that is not positive MXNet draws numbers of a gamma distribution for ever.
        for j, reader in enumerate(READERS if name != "sample_gamma" else ()):
            levels = ("three levels", "everything")
            row = operator(name, reader, levels, shares=(1, 0.7, 0.4), steps=1)
            mark = SLOW if k % 20 == 0 and k % len(READERS) == j else BY_HAND
            mark = QUICK if name in TELLING else mark
            yield f"{name} before {reader}", row._replace(may_be_refused=True), mark


def float16() -> Network:
    """Build normalizations, whose statistics are moved by the last run, which is not the first."""
    net = S.Variable("data", dtype="float16")
    for _ in range(4):
        net = S.Activation(S.BatchNorm(net * net, fix_gamma=False), act_type="sigmoid")
    return net, {"data": (4, 3, 5, 5)}


def read_for_its_shape() -> Network:
    """Build a BlockGrad behind a Dropout: its gradient is zeros of its input's shape."""
    x = S.Convolution(S.Variable("data"), kernel=(3, 3), pad=(1, 1), num_filter=2)
    x = S.FullyConnected(S.BlockGrad(S.Dropout(x, p=0.3)), num_hidden=3)
    return S.SoftmaxOutput(x, name="softmax"), {"data": (1, 2, 2, 2), "softmax_label": (1,)}


def named_in_any_letters() -> Network:
    x = S.Variable("données")
    for i in range(4):
        x = S.Activation(S.FullyConnected(x, num_hidden=4, name=f"é{i}"), "tanh")
    return S.SoftmaxOutput(x, name="softmax"), {"données": (2, 4)}


def softmax_of_blocks(op: str) -> Network:
    """Build a softmax that overwrites blocks: apart from them MXNet dies."""

    def convolved(x: Any) -> Any:
        return S.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1))

    data = S.var("data")
    x = S.BlockGrad(getattr(S, op)(convolved(data), name="softmax")) * convolved(data)
    x = S.FullyConnected(S.softsign(convolved(x)), num_hidden=3)
    return S.MakeLoss(S.mean(S.square(x))), {"data": (4, 8, 6, 6)}


def max_of_a_sum() -> Network:
    """Build a sum of plain and blocked terms, in the layout of what it overwrites."""
    x = S.var("data")
    for _ in range(2):
        x = S.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1))
    x = S.Pooling(S.zeros_like(x) + x, kernel=(2, 2), stride=(2, 2), pool_type="max")
    loss = S.MakeLoss(S.mean(S.square(S.FullyConnected(S.softsign(x), num_hidden=3))))
    return loss, {"data": (4, 8, 6, 6)}


def viewed(view: str, first: bool) -> Network:
    """Read blocks by a view, which may make them plain, and by a BatchNorm."""
    x = S.relu(S.Convolution(S.var("data"), num_filter=8, kernel=(3, 3), pad=(1, 1)))
    views = {
        "Flatten": S.Flatten,
        "expand_dims": lambda x: S.expand_dims(x, axis=1),
        "reshape_like": lambda x: S.reshape_like(x, S.zeros((4, 512))),
    }
    parts = [S.sin(views[view](x)), S.sin(S.BatchNorm(x, fix_gamma=False))]
    return S.Group([S.MakeLoss(part) for part in parts[:: 1 if first else -1]]), {
        "data": (4, 3, 8, 8)
    }


def pooled_and_viewed() -> Network:
    """Pool blocks that a view makes plain: MXNet's gradient is wrong, with or without a plan."""
    x = S.BatchNorm(
        S.Convolution(S.var("data"), num_filter=8, kernel=(3, 3), pad=(1, 1)), fix_gamma=False
    )
    pool = S.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max", name="pool")
    parts = [S.sin(pool) * 2, S.sin(S.Flatten(x))]
    return S.Group([S.MakeLoss(part) for part in parts]), {"data": (4, 3, 8, 8)}


def pooled_to_one(**pooling: Any) -> Network:
    """Build a product in place that makes blocks of the image that is pooled."""

    def normed(x: Any, name: str) -> Any:
        x = S.Convolution(x, num_filter=32, kernel=(3, 3), pad=(1, 1), name=f"conv_{name}")
        return S.BatchNorm(x, fix_gamma=False, name=name)

    x = S.relu(normed(S.var("data"), "first"))
    x = S.relu(S.broadcast_mul(normed(x, "second"), x, name="product"))
    x = S.Pooling(x, pool_type="avg", **{"kernel": (1, 1), **pooling})
    symbol = S.SoftmaxOutput(S.FullyConnected(x, num_hidden=5), name="softmax")
    return symbol, {"data": (4, 3, 8, 8), "softmax_label": (4,)}


SOME: Any = {"levels": ("plain", "marks", "six levels"), "added": "marks"}
IN_FLOAT64: Any = {"types": {"data": "float64"}, "levels": ("one level", "everything")}
NETWORKS: dict[str, Row] = {
    **{name: Row(build, **SOME) for name, build in {**TINY, **DETECTION}.items()},
    **{name: Row(build, added="one level") for name, build in OUTPUTS.items()},
    "shared weights": Row(TINY["shared weights"], steps=1),  # trained longer it diverges
    **{f"drawn {seed}": Row(functools.partial(drawn, seed), **SOME) for seed in (1, 2, 3)},
    **{
        name: Row(functools.partial(build, hidden=16, batch=8, depth=4), **SOME)
        for name, build in OPAQUE.items()
    },
    "mirror_stage": Row(lambda: (modules.net(stage="two"), modules.SHAPES), **SOME),
    # A convolution in float64 is not MKLDNN's: recomputed, its output must be read.
    "float64": Row(
        lambda: (modules.net(), modules.SHAPES),
        types=dict.fromkeys(modules.SHAPES, "float64"),
        **SOME,
    ),
    "float16": Row(float16, levels=("three levels", "everything"), types={"data": "float16"}),
    **{
        f"{name} in float64": operator(name, "alone", ())._replace(**IN_FLOAT64)
        for name in ("Convolution", "BatchNorm", "FullyConnected", "LayerNorm")
    },
    "read for its shape": Row(read_for_its_shape),
    "named in any letters": Row(named_in_any_letters),
    **{op: Row(functools.partial(softmax_of_blocks, op)) for op in ("softmax", "log_softmax")},
    "max of a sum": Row(max_of_a_sum, levels=("three levels", "six levels")),
    "pooled and viewed": Row(pooled_and_viewed, lambda net: ["pool"], may_be_refused=True),
    **{
        f"{view} {place} a BatchNorm": Row(functools.partial(viewed, view, place == "before"))
        for view in ("Flatten", "expand_dims", "reshape_like")
        for place in ("before", "after")
    },
    **{
        f"pooled, {kind}": Row(
            functools.partial(pooled_to_one, **pooling), lambda net: ["second", "product"], **SOME
        )
        for kind, pooling in (
            ("at once", {"global_pool": True}),
            ("by 8", {"kernel": (8, 8), "stride": (8, 8)}),
        )
    },
}
ROWS = {
    **{name: (row, mark) for name, row, mark in operators()},
    **{name: (row, QUICK) for name, row in NETWORKS.items()},
}
each_row = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=mark) for name, (_, mark) in ROWS.items()]
)


# -- the columns --------------------------------------------------------------------------------


def masks_of(row: Row, symbol: Any, rules: Rules) -> Iterator[np.ndarray]:
    """Yield what is marked of what the rules allow, before they have said what must follow."""
    names, random = [node.name for node in rules.graph.nodes], np.random.RandomState(0)
    if row.alone is not None:
        yield np.isin(names, list(row.alone(symbol)))
    for share in row.shares:
        yield random.uniform(size=len(names)) < share


@each_row
def test_marks_change_no_bit_and_take_what_is_replayed(name: str) -> None:
    row = ROWS[name][0]
    symbol, shapes = row.build()
    if row.may_be_refused and not is_trainable(symbol, shapes):
        pytest.skip("MXNet cannot train it")
    graph, options = forward(symbol, shapes, row.types), row.options(symbol, shapes)
    training, asked, chosen = training_graph(graph), as_module(symbol, shapes), set()
    for targets in (ANYWHERE, ON_CPU) if row.alone else (ANYWHERE,):
        rules = rules_of(symbol, shapes, targets, row.types)
        masks = masks_of(row, symbol, rules)
        chosen |= {tuple(rules.apply(rules.recomputable & mask).tolist()) for mask in masks}
    for mask in map(np.array, sorted(chosen)):
        planned = marks.write(symbol, mask)
        for request in ("write", "add") if row.added else ("write",):
            requests = {n: request if r == "write" else "null" for n, r in asked.items()}
            assert_alike(symbol, planned, shapes, grad_req=requests, **options)
        # MXNet copies an output that is listed twice, which no replay knows.
        if not training.inexact and len({*graph.heads}) == len(graph.heads):
            assert_bound(pool(training, mask), bind(planned, graph, mx.cpu()))


@each_row
def test_schedules_change_no_bit_and_take_what_is_predicted(name: str) -> None:
    """With every other one whatever is dead is overwritten: no operator reads it."""
    row = ROWS[name][0]
    symbol, shapes = row.build()
    options = row.options(symbol, shapes)
    if name.startswith(("foreach", "_CachedOp")):
        with pytest.raises(memonger.MemongerError, match="a graph of its own; how='marks' can"):
            memonger.plan(symbol, shapes, how="schedule")
        return
    if row.may_be_refused and not is_trainable(symbol, shapes):
        pytest.skip("MXNet cannot train it")
    work = work_of(symbol, shapes, type_dict=row.types)
    for k, level in enumerate(row.levels):
        schedule, requests = LEVELS[level](work, 0), as_module(symbol, shapes)
        if level == row.added:
            requests = {n: "null" if n in shapes else "add" for n in requests}
        check(work, schedule)
        planned = scheduled(symbol, schedule)
        try:
            with environment(MEMONGER_POISON="" if k % 2 else "1"):
                assert_alike(symbol, planned, shapes, grad_req=requests, **options)
        except LayoutMismatch:
            assert row.may_be_refused
            continue
        executor = planned.simple_bind(mx.cpu(), requests, row.types, **shapes)
        arguments = {id(array) for array in executor.arg_arrays}
        outputs = {id(a): a for a in executor.outputs if id(a) not in arguments}
        taken = executor.arena.nbytes + sum(a.size * a.dtype().itemsize for a in outputs.values())
        graph = forward(symbol, shapes, row.types)
        step = step_for(graph, schedule, requests, has_mkldnn(mx.cpu()))
        assert taken == arena(step).pool_bytes
        check_memory(step)


class Positive(mx.init.Initializer):
    """Values in [0, 0.5) of all parameters and states, whatever their names are."""

    def __call__(self, _: Any, array: Any) -> None:
        array[:] = mx.nd.random.uniform(0, 0.5, array.shape)


@pytest.mark.parametrize(
    "name", ["resnet", "transformer", "cells", "fused cells", "unet, identities"]
)
def test_blocks_change_no_bit(name: str) -> None:
    """Each network is a block, whose inputs are its data and labels."""

    def trained(prepare: Prepare) -> Arrays:
        symbol, shapes = ROWS[name][0].build()
        net = mx.gluon.SymbolBlock(symbol, [S.var(name) for name in shapes])
        net.initialize(Positive())

        def drawn_batch(k: int) -> Any:
            random = np.random.RandomState(k)
            return [mx.nd.array(random.uniform(0, 3, shape)) for shape in shapes.values()], None

        prepare(net)
        return train(
            net, lambda x, y, k: net(*x), batches=drawn_batch, backward=mx.autograd.backward
        )

    assert unlike_plain(trained) == {}


def test_foreach_in_a_planned_network_changes_no_bit() -> None:
    """In the threaded engine MKLDNN may change the layout of an array while the loop reads it."""
    code = """
import test_bits_and_bytes as t
t.ROWS["foreach inside"] = t.operator("foreach", "inside", ()), ()
t.test_marks_change_no_bit_and_take_what_is_replayed("foreach inside")
"""
    run_code(code, MXNET_ENGINE_TYPE="NaiveEngine")
