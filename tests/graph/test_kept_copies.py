"""Kept copies: identities that a plan puts behind operators, on graphs and on symbols."""

from __future__ import annotations

import dataclasses

import json
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from memonger.graph import marks
from memonger.costs.replay import replay
from memonger.costs.bind import bind, planned_mb
from memonger.graph.forward import (
    KeptCopy,
    copy_names,
    mask_with_copies,
    with_copies,
)
from memonger.graph.read import forward_graph
from memonger.graph.inputs import read_shapes
from memonger.graph.operators.recompute import CPU, targets_of
from memonger.planners.marks.copies import copyable, settle

import networks
from generated import networks as generated
from planned import nodes, rules_of

S = mx.sym


def random_plan(
    rules: Any, seed: int, share: float, unfused: bool = False
) -> tuple[np.ndarray, tuple[KeptCopy, ...]]:
    """A random plan with random copies, as far as it is right."""
    random = np.random.RandomState(seed)
    copies = tuple(copy for copy in copyable(rules) if random.uniform() < 0.5)
    copies = tuple(copy._replace(unfused=unfused) for copy in copies)
    mask = rules.allowed & (random.uniform(size=len(rules.allowed)) < share)
    mask[[copy.node for copy in copies]] = True
    _, _, mask, copies = settle(rules, mask, copies)
    return mask, copies


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(generated(), st.integers(0, 2**16), st.sampled_from([0.5, 0.9, 1.0]), st.booleans())
def test_random_copies_train_bit_for_bit(
    drawn: Any, seed: int, share: float, unfused: bool
) -> None:
    symbol, shapes = drawn
    rules = rules_of(symbol, shapes)
    mask, copies = random_plan(rules, seed, share, unfused)
    copies = marks.inferable(symbol, copies, shapes)
    planned = marks.apply(symbol, mask, rules.native(mask), copies)
    report = memonger.check(symbol, planned, shapes, seed=seed)
    assert report, str(report)
    assert planned.list_outputs() == symbol.list_outputs()
    assert planned.list_inputs() == symbol.list_inputs()
    assert memonger.unplan(planned).tojson() == symbol.tojson()


NETS = {
    "resnet": lambda: networks.resnet((1, 1, 1, 1), batch=4),
    "lstm": lambda: networks.lstm(steps=6),
    "unet": lambda: networks.unet(batch=1, image=64),
    "two heads": lambda: networks.two_heads(),
    "transformer": lambda: networks.transformer(layers=2),
}


@pytest.mark.parametrize("name", NETS)
def test_graph_and_symbol_agree(name: str) -> None:
    """``forward.with_copies`` tells beforehand what graph and memory ``marks.apply`` gives."""
    symbol, shapes = NETS[name]()
    spec = read_shapes(symbol, shapes, {}, None)
    rules = rules_of(symbol, shapes)
    tied = 0
    for seed in range(4):
        mask, copies = random_plan(rules, seed, 0.9, unfused=seed % 2 == 1)
        assert copies
        tied += sum(bool(copy.tie) for copy in copies)
        planned = marks.apply(symbol, mask, rules.native(mask), copies)
        graph, moved = with_copies(rules.graph, copies)
        told = forward_graph(planned, spec)

        def plain(graph: Any) -> Any:  # BatchNorm's cudnn_off is the plan's own
            return dataclasses.replace(
                graph,
                nodes=tuple(
                    n._replace(hidden={}, attrs={**n.attrs, "cudnn_off": ""}) for n in graph.nodes
                ),
            )

        assert plain(graph) == plain(told)
        full = mask_with_copies(mask, moved, copies, len(graph.nodes))
        assert (full == marks.recomputed(told)).all()
        training = rules.with_copies(copies)[0].trainings[0]
        executor = bind(planned, rules.graph, mx.cpu())
        assert replay(training, full).pool_bytes >> 20 == planned_mb(executor)
    assert tied or name != "lstm"


def gate() -> Any:
    """A product of two results, which pointwise fusion would take."""
    x = S.Variable("data")
    a = S.FullyConnected(x, num_hidden=64, name="a")
    b = S.FullyConnected(x, num_hidden=64, name="b")
    product = S.elemwise_mul(a, b, name="product")
    return S.LinearRegressionOutput(S.FullyConnected(product, num_hidden=2, name="fc"), name="out")


def test_only_what_nobody_else_reads_is_tied() -> None:
    rules = rules_of(gate(), {"data": (4, 8)})
    ties = {rules.graph.nodes[copy.node].name: copy.tie for copy in copyable(rules)}
    assert ties == {"a": "", "b": "", "product": "float32", "fc": ""}
    cpu = rules_of(gate(), {"data": (4, 8)}, frozenset((CPU,)))
    assert not any(copy.tie for copy in copyable(cpu))


def test_a_tie_keeps_the_rules_content() -> None:
    """Without it the product would be kept, and with it what it was computed from."""
    rules = rules_of(gate(), {"data": (4, 8)})
    names = [node.name for node in rules.graph.nodes]
    product = names.index("product")
    for tie, recomputed in (("", False), ("float32", True)):
        copies = (KeptCopy(product, tie),)
        _, _, mask, left = settle(rules, rules.allowed, copies)
        assert mask[product] == recomputed
        assert bool(left) == recomputed


def test_names_that_are_taken() -> None:
    names = ["x", "x_keep", "y", "y_tie_keep"]
    found = copy_names(names, [KeptCopy(0), KeptCopy(2, "float32")])
    assert found == {0: ["x_1_keep"], 2: ["y_one_keep", "y_tie_1_keep", "y_keep"]}


def test_only_plans_for_fusion_alone_have_unfused_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKLDNN's inference would run a convolution and what is behind such a copy apart."""
    monkeypatch.setenv("MXNET_USE_FUSION", "1")
    for device, expected in (("gpu", True), ("cpu", False), (None, False)):
        copies = copyable(rules_of(gate(), {"data": (4, 8)}, targets_of(device)))
        assert copies and all(copy.unfused == expected for copy in copies)
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    copies = copyable(rules_of(gate(), {"data": (4, 8)}, targets_of("gpu")))
    assert copies and not any(copy.unfused for copy in copies)


def rnn() -> tuple[Any, Any]:
    """Its states begin as zeros of a batch that MXNet infers from what they are added to."""
    steps, _ = mx.rnn.LSTMCell(8, prefix="").unroll(3, S.Variable("data"), merge_outputs=True)
    net = S.LinearRegressionOutput(S.FullyConnected(steps, num_hidden=2), name="out")
    return net, {"data": (4, 3, 5)}


def test_unfused_copies_leave_shapes_to_be_inferred() -> None:
    symbol, shapes = rnn()
    names = [node["name"] for node in nodes(symbol)]
    products = ("t0_i2h", "t0_h2h", "t1_h2h")
    copies = [KeptCopy(names.index(name), "", True) for name in products]
    mask = np.zeros(len(names), dtype=np.bool_)
    with pytest.raises(mx.MXNetError, match="t0_h2h_keep"):
        marks.apply(symbol, mask, (), copies).infer_shape(**shapes)
    left = marks.inferable(symbol, copies, shapes)
    assert [copy.unfused for copy in left] == [True, False, True]
    planned = marks.apply(symbol, mask, (), left)
    assert planned.infer_shape(**shapes) == symbol.infer_shape(**shapes)
    assert memonger.unplan(planned).tojson() == symbol.tojson()


@pytest.mark.parametrize("recomputed", [False, True])
def test_copies_that_keep_a_sum_apart_change_no_bit(recomputed: bool) -> None:
    """They stay in a plan, whether the sum is computed again or not."""
    x, total = S.Variable("data"), None
    for k in range(4):
        x = S.tanh(S.FullyConnected(x, num_hidden=8, name="fc%d" % k))
        total = x if total is None else total + x
    net = S.LinearRegressionOutput(S.FullyConnected(S.relu(total), num_hidden=2), name="out")
    shapes = {"data": (4, 8)}
    rules = rules_of(net, shapes, targets_of("gpu"))
    sums = [i for i, node in enumerate(rules.graph.nodes) if node.op == "elemwise_add"]
    apart = tuple(KeptCopy(i, unfused=True, apart=True) for i in sums)
    wanted = rules.allowed.copy()
    wanted[sums] &= recomputed
    _, _, mask, left = settle(rules, wanted, apart)
    assert left == apart and len(left) == 3 and mask.any()
    planned = marks.apply(net, mask, rules.native(mask), left)
    assert sum(n["op"] == "reshape_like" for n in nodes(planned)) == 3
    assert memonger.check(net, planned, shapes)
    assert memonger.unplan(planned).tojson() == net.tojson()


def test_float64_ties() -> None:
    symbol, shapes, types = gate(), {"data": (4, 8)}, {"data": "float64"}
    spec = read_shapes(symbol, shapes, {}, types)
    graph = forward_graph(symbol, spec)
    product = [node.name for node in graph.nodes].index("product")
    mask = np.array([node.op == "elemwise_mul" for node in graph.nodes])
    for unfused in (False, True):
        planned = marks.apply(symbol, mask, (), [KeptCopy(product, "float64", unfused)])
        assert memonger.check(symbol, planned, shapes, type_dict=types)


def test_an_option_leaves_the_operators_untouched() -> None:
    symbol, shapes = networks.unet(batch=1, image=64)
    with_them = memonger.plan(symbol, shapes)
    without = memonger.plan(symbol, shapes, kept_copies=False)
    assert with_them.copies and not without.copies
    assert with_them.counted_bytes < without.counted_bytes
    assert [n["name"] for n in nodes(without.symbol)] == [n["name"] for n in nodes(symbol)]
    added = [n["name"] for n in nodes(with_them.symbol) if n["name"].endswith("_keep")]
    assert sorted(added) == sorted(with_them.copies)


def test_a_planned_symbol_is_planned_anew() -> None:
    symbol, shapes = networks.unet(batch=1, image=64)
    planned = memonger.search_plan(symbol, shapes=shapes)
    assert any(n["name"].endswith("_keep") for n in nodes(planned))
    again = memonger.search_plan(planned, shapes=shapes)
    assert json.loads(again.tojson()) == json.loads(planned.tojson())
