"""Marks on a symbol: what is added, what is kept, and that it comes off again."""

from __future__ import annotations

import json
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.graph.operators.recompute import ANYWHERE, CPU
from memonger.planners.marks.cuts import cheap_cuts, single_tensor_cuts
from memonger.support.cache import forget
from memonger.graph.training import merged_nodes

import networks
from planned import every_cut, forward, marked, nodes, rules_of

pytestmark = pytest.mark.python_differs

S = mx.sym
SHAPES = {"data": (256, 512)}


def net(**first: Any) -> Any:
    """Eight layers; the first node carries the attributes ``first``."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=512, name="fc", attr=first)
    for i in range(8):
        x = S.Activation(S.BatchNorm(x * 2, name="bn%d" % i), act_type="tanh")
    return S.LinearRegressionOutput(x, name="out")


def test_everything_stays_under_its_name() -> None:
    symbol = net()
    before = symbol.tojson()
    planned = memonger.search_plan(symbol, shapes=SHAPES, kept_copies=False)
    assert symbol.tojson() == before and marked(planned)
    assert [(n["op"], n["name"], n["inputs"]) for n in nodes(planned)] == [
        (n["op"], n["name"], n["inputs"]) for n in nodes(symbol)
    ]
    assert planned.list_arguments() == symbol.list_arguments()
    assert planned.list_auxiliary_states() == symbol.list_auxiliary_states()
    assert planned.list_outputs() == symbol.list_outputs()


@pytest.mark.parametrize("first", [{}, {"force_mirroring": "True"}, {"ctx_group": "a"}])
def test_unplan_gives_the_original_back(first: Any) -> None:
    symbol = net(**first)
    planned = memonger.search_plan(symbol, shapes=SHAPES)
    assert marked(planned)
    assert memonger.unplan(planned).tojson() == symbol.tojson()
    loaded = mx.sym.load_json(planned.tojson())
    assert memonger.unplan(loaded).tojson() == symbol.tojson()
    assert memonger.unplan(symbol).tojson() == symbol.tojson()


def test_the_users_cudnn_off_stays() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=512)
    for i in range(6):
        x = S.tanh(S.BatchNorm(x, cudnn_off=i % 2 == 0, name="bn%d" % i))
    symbol = S.LinearRegressionOutput(x, name="out")
    planned = memonger.make_mirror_plan(symbol, 0, shapes=SHAPES)
    assert {"bn0", "bn1"} <= set(marked(planned))
    assert all(planned.attr_dict()["bn%d" % i]["cudnn_off"] == "True" for i in range(6))
    plain = memonger.unplan(planned).attr_dict()
    assert plain["bn0"]["cudnn_off"] == "True" and plain["bn1"]["cudnn_off"] == "False"


def test_planning_a_plan_is_planning_the_network() -> None:
    symbol = net()
    once = memonger.search_plan(symbol, shapes=SHAPES)
    forget()
    assert memonger.search_plan(once, shapes=SHAPES).tojson() == once.tojson()
    chen = memonger.make_mirror_plan(symbol, 0, shapes=SHAPES)
    forget()
    assert memonger.search_plan(chen, shapes=SHAPES).tojson() == once.tojson()


def test_twins_share_one_mark() -> None:
    """Marked differently MXNet would not merge them, and gradients would add up otherwise."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=8)
    a, b = S.tanh(x, name="a"), S.tanh(x, name="b")
    symbol = S.LinearRegressionOutput(a * S.sigmoid(b), name="out")
    graph = forward(symbol, {"data": (4, 3)})
    name = [n.name for n in graph.nodes]
    assert merged_nodes(graph)[name.index("b")] == name.index("a")
    rules = rules_of(symbol, {"data": (4, 3)})
    one = np.array([n == "a" for n in name])
    both = np.array([n in ("a", "b") for n in name])
    assert not rules.apply(one).any()
    assert rules.apply(both).tolist() == both.tolist()


def test_unread_operators_are_kept_until_none_is_left() -> None:
    """Nobody reads the product's copy. On a CPU that is well, and it reads LayerNorm's; with fusion
    the product must be kept, and then nobody reads LayerNorm's copy either.
    """
    x = S.FullyConnected(S.Variable("data"), num_hidden=8)
    norm = S.LayerNorm(x, name="norm")
    double = S.tanh(S._internal._mul_scalar(norm, scalar=2, name="double"))
    symbol = S.LinearRegressionOutput(double, name="out")
    for targets, left in ((ANYWHERE, []), (frozenset((CPU,)), ["norm", "double"])):
        rules = rules_of(symbol, {"data": (4, 3)}, targets)
        names = [n.name for n in rules.graph.nodes]
        mask = rules.apply(np.array([n in ("norm", "double") for n in names]))
        assert [n for n, m in zip(names, mask) if m] == left


def test_amp_casts_survive() -> None:
    """A plain tojson() would drop them, and with them the numbering of the nodes."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=512)
    x = S.amp_cast(S.amp_cast(x, dtype="float16"), dtype="float32")
    for _ in range(6):
        x = S.tanh(x * 2)
    symbol = S.LinearRegressionOutput(x, name="out")
    planned = memonger.search_plan(symbol, shapes=SHAPES)
    assert [n["op"] for n in nodes(planned)] == [n["op"] for n in nodes(symbol)]
    assert memonger.check(symbol, planned, SHAPES)


def test_sparse_gradients_train_as_well() -> None:
    x = S.Embedding(S.Variable("ids"), input_dim=1000, output_dim=64, sparse_grad=True, name="e")
    for _ in range(6):
        x = S.tanh(S.FullyConnected(x, num_hidden=256, flatten=False) * 2)
    symbol, shapes = S.LinearRegressionOutput(x, name="out"), {"ids": (64, 32)}
    planned = memonger.search_plan(symbol, shapes=shapes)
    assert marked(planned)
    assert memonger.get_cost(planned, shapes=shapes) < memonger.get_cost(symbol, shapes=shapes)
    assert memonger.check(symbol, planned, shapes)


def test_single_tensor_cuts() -> None:
    symbol, shapes = networks.resnet((1, 1, 1, 1), batch=2, image=32, filters=4)
    graph = forward(symbol, shapes)
    cuts = {graph.nodes[i].name for i in single_tensor_cuts(graph)}
    assert {"convolution0", "batchnorm0", "leakyrelu0", "pooling0", "_plus0", "fc1"} <= cuts
    assert "convolution1" not in cuts and "leakyrelu4" not in cuts


@pytest.mark.parametrize("label", ["True", "7"])
def test_marks_however_they_are_set(label: str) -> None:
    def built(way: str) -> Any:
        with mx.name.NameManager():
            x = S.FullyConnected(S.Variable("data"), num_hidden=512)
            for _ in range(6):
                x = S.tanh(x)
                if way == "attr=":
                    x = S.sigmoid(x, attr={"mirror_stage": label})
                elif way == "AttrScope":
                    with mx.AttrScope(mirror_stage=label):
                        x = S.sigmoid(x)
                else:
                    x = S.sigmoid(x)
                    x._set_attr(mirror_stage=label)
            return S.LinearRegressionOutput(x, name="out")

    plans = {
        memonger.make_mirror_plan(built(way), 1, rules=False, shapes=SHAPES).tojson()
        for way in ("_set_attr", "AttrScope", "attr=")
    }
    assert len(plans) == 1
    # Results are 0.5 MB each; every second cut comes after more than 1 MB.
    kept = ["sigmoid%d" % i for i in ((0, 2, 4) if label == "True" else range(6))]
    assert marked(mx.sym.load_json(plans.pop()), "False") == kept


def test_shapes_in_every_form() -> None:
    symbol = net()
    desc = [mx.io.DataDesc("data", SHAPES["data"])]
    known = net()
    assert (
        len(
            {
                memonger.get_cost(symbol, data=SHAPES["data"]),
                memonger.get_cost(symbol, shapes=SHAPES),
                memonger.get_cost(symbol, shapes=desc),
                memonger.get_cost(symbol, shapes=(desc, [("out_label", (256, 512))])),
                memonger.get_cost(symbol, shapes=(desc, None)),
                memonger.get_cost(_with_own_shape(known)),
            }
        )
        == 1
    )


def _with_own_shape(symbol: Any) -> Any:
    data = S.Variable("data", shape=SHAPES["data"])
    return symbol(data=data)


def test_cuts_keep_what_is_alive() -> None:
    """A skip connection: between its ends two tensors must be kept, elsewhere one."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=8, name="fc")
    skip = S.tanh(x, name="skip")
    inner = S.sigmoid(skip, name="inner")
    total = S.sum(inner, axis=1, keepdims=True, name="total")
    symbol = S.LinearRegressionOutput(S.broadcast_add(total, skip), name="out")
    graph = forward(symbol, {"data": (4, 3)})
    name = [n.name for n in graph.nodes]
    cuts = {name[c.after]: ([name[i] for i in c.keep], c.size) for c in every_cut(graph)}
    assert cuts["fc"] == (["fc"], 4 * 8 * 4)
    assert cuts["skip"] == (["skip"], 4 * 8 * 4)
    assert cuts["inner"] == (["skip", "inner"], 2 * 4 * 8 * 4)
    assert cuts["total"][1] == 4 * 8 * 4 + 4 * 4
    assert len(cheap_cuts(graph, 2)) == 2


def test_networks_without_single_tensor_cuts_are_planned() -> None:
    """Two streams that exchange sums: a cut must always keep both."""
    a = S.FullyConnected(S.Variable("data"), num_hidden=512)
    b = S.FullyConnected(a, num_hidden=512)
    for _ in range(12):
        a, b = S.tanh(a + b), S.sigmoid(S.FullyConnected(b - a, num_hidden=512))
    symbol = S.LinearRegressionOutput(a + b, name="out")
    planned = memonger.search_plan(symbol, shapes=SHAPES)
    before, after = (memonger.get_cost(s, shapes=SHAPES) for s in (symbol, planned))
    assert after < 0.8 * before
    forget()
    assert memonger.search_plan(symbol, shapes=SHAPES).tojson() == planned.tojson()
    assert memonger.check(symbol, planned, SHAPES)


@pytest.mark.parametrize("record", ["", "[]", "{", '{"x": 1}', '"other"', "null"])
def test_a_damaged_record_of_a_plan(record: str) -> None:
    """Of a planned network whose file was changed."""
    graph = json.loads(memonger.search_plan(net(), shapes=SHAPES).tojson())
    node = next(n for n in graph["nodes"] if n["op"] != "null")
    node["attrs"]["__memonger__"] = record
    damaged = mx.sym.load_json(json.dumps(graph))
    for call in (memonger.unplan, lambda symbol: memonger.plan(symbol, SHAPES)):
        with pytest.raises(memonger.MemongerError, match="no plan has written"):
            call(damaged)


def test_a_node_that_no_plan_has_put_in() -> None:
    """A source of the network that is marked as if it were the plan's own."""
    x = mx.sym.ones((2, 3)) + mx.sym.Variable("data")
    graph = json.loads(x.tojson())
    next(n for n in graph["nodes"] if n["op"] == "_ones")["attrs"]["__memonger__"] = '"inserted"'
    with pytest.raises(memonger.MemongerError, match="for itself alone"):
        memonger.unplan(mx.sym.load_json(json.dumps(graph)))
