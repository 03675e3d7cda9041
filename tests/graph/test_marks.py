"""Marks and saved identities on a symbol: what is added and kept, and that it comes off again."""

from __future__ import annotations

import json
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.graph import marks
from memonger.graph.forward import SavedIdentity, insert_identities
from memonger.graph.operators.recompute import ANYWHERE, CPU, targets_of
from memonger.planners.marks.cuts import cheap_cuts
from memonger.planners.candidates import MarkPlan
from memonger.planners.marks.identities import list_identities, drop_unused_identities
from memonger.support.cache import forget
from memonger.support.kernels import compiled

from planned import cut_as_original, every_cut, forward, marked, nodes, rules_of


S = mx.sym
SHAPES = {"data": (256, 512)}


def net(**first: Any) -> Any:
    """Build eight layers; the first node carries the attributes ``first``."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=512, name="fc", attr=first)
    for i in range(8):
        x = S.Activation(S.BatchNorm(x * 2, name=f"bn{i}"), act_type="tanh")
    return S.LinearRegressionOutput(x, name="out")


@pytest.mark.parametrize("first", [{}, {"force_mirroring": "True"}, {"ctx_group": "a"}])
def test_what_stays_and_what_comes_off_again(first: Any) -> None:
    """Every node stays under its name, and the user's own attributes."""
    symbol = net(**first)
    before = symbol.tojson()
    planned = memonger.search_plan(symbol, shapes=SHAPES)
    assert symbol.tojson() == before and marked(planned)
    names = [n["name"] for n in nodes(planned) if not n["name"].endswith("_keep")]
    assert names == [n["name"] for n in nodes(symbol)]
    for kind in ("arguments", "auxiliary_states", "outputs"):
        assert getattr(planned, "list_" + kind)() == getattr(symbol, "list_" + kind)()
    for network in (planned, mx.sym.load_json(planned.tojson()), symbol):
        assert memonger.unplan(network).tojson() == before


def test_operators_that_mxnet_merges_are_recomputed_together() -> None:
    """With different marks MXNet would not merge them, and gradients would be added otherwise."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=4, name="fc")
    twins = [S.Activation(x, act_type="sigmoid", name=name) for name in ("one", "other")]
    symbol = S.MakeLoss(S.tanh(twins[0] * twins[1]), name="loss")
    rules = rules_of(symbol, {"data": (2, 3)})
    is_twin = np.array([node.name in ("one", "other") for node in rules.graph.nodes])
    for k in np.flatnonzero(is_twin):
        assert not rules.apply(np.arange(len(is_twin)) == k).any()
    assert (rules.apply(is_twin) == is_twin).all()


def test_the_users_cudnn_off_stays() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=512)
    for i in range(6):
        x = S.tanh(S.BatchNorm(x, cudnn_off=i % 2 == 0, name=f"bn{i}"))
    symbol = S.LinearRegressionOutput(x, name="out")
    planned = memonger.make_mirror_plan(symbol, 0, shapes=SHAPES)
    assert {"bn0", "bn1"} <= set(marked(planned))
    assert all(planned.attr_dict()[f"bn{i}"]["cudnn_off"] == "True" for i in range(6))
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


def test_unread_operators_are_kept_until_none_is_left() -> None:
    """On a CPU an unread product is well; with fusion it is kept, and LayerNorm unread then."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=8)
    norm = S.LayerNorm(x, name="norm")
    double = S.tanh(S._internal._mul_scalar(norm, scalar=2, name="double"))
    symbol = S.LinearRegressionOutput(double, name="out")
    for targets, left in ((ANYWHERE, []), (frozenset((CPU,)), ["norm", "double"])):
        rules = rules_of(symbol, {"data": (4, 3)}, targets)
        names = [n.name for n in rules.graph.nodes]
        mask = rules.apply(np.array([n in ("norm", "double") for n in names]))
        assert [n for n, m in zip(names, mask) if m] == left


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_amp_casts_survive(how: str, tmp_path: Any) -> None:
    """MXNet's tojson() would drop them, and with them the numbering of the nodes; so would save."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=512)
    x = S.amp_cast(S.amp_cast(x, dtype="float16"), dtype="float32")
    for _ in range(6):
        x = S.tanh(x * 2)
    symbol = S.LinearRegressionOutput(x, name="out")
    planned = memonger.plan(symbol, SHAPES, how=how, patience=0.02).symbol
    file = str(tmp_path / "network.json")
    planned.save(file)
    for network in (planned, mx.sym.load(file)):
        ops = [n["op"] for n in nodes(network) if n["op"] != "_copy"]  # without saved identities
        assert ops == [n["op"] for n in nodes(symbol)]
        assert memonger.check(symbol, network, SHAPES)


@pytest.mark.parametrize("label", ["True", "7"])
def test_marks_of_an_attribute_a_scope_or_a_call_are_the_same(label: str) -> None:
    mark = {"mirror_stage": label}

    def sigmoid(x: Any, way: str) -> Any:
        with mx.AttrScope(**(mark if way == "scope" else {})):
            x = S.sigmoid(x, attr=mark if way == "attr" else {})
        if way == "set":
            x._set_attr(**mark)
        return x

    plans = set()
    for way in ("attr", "scope", "set"):
        with mx.name.NameManager():
            x = S.FullyConnected(S.Variable("data"), num_hidden=512)
            for _ in range(6):
                x = sigmoid(S.tanh(x), way)
            symbol = S.LinearRegressionOutput(x, name="out")
        planned = cut_as_original(symbol, SHAPES, 1)
        plans.add(planned.tojson())
    assert len(plans) == 1
    # Results are 0.5 MB each; every second cut comes after more than 1 MB.
    kept = [f"sigmoid{i}" for i in ((0, 2, 4) if label == "True" else range(6))]
    assert marked(planned, "False") == kept


def test_shapes_may_be_a_dict_pairs_or_descriptions() -> None:
    desc = [mx.io.DataDesc("data", SHAPES["data"])]
    label = [("out_label", (256, 512))]
    forms: list[Any] = [SHAPES, desc, desc + label, (desc, label), (desc, None)]
    own = net()(data=S.Variable("data", shape=SHAPES["data"]))
    costs = {memonger.get_cost(net(), shapes=form) for form in forms}
    assert costs == {memonger.get_cost(net(), data=SHAPES["data"])} == {memonger.get_cost(own)}


def test_cuts_keep_what_is_alive() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=8, name="fc")
    skip = S.tanh(x, name="skip")
    inner = S.sigmoid(skip, name="inner")
    total = S.sum(inner, axis=1, keepdims=True, name="total")
    symbol = S.LinearRegressionOutput(S.broadcast_add(total, skip), name="out")
    graph = forward(symbol, {"data": (4, 3)})
    name = [n.name for n in graph.nodes]
    cuts = {name[c.after]: [name[i] for i in c.keep] for c in every_cut(graph)}
    assert cuts["fc"] == ["fc"] and cuts["skip"] == ["skip"]
    assert cuts["inner"] == ["skip", "inner"] and cuts["total"] == ["skip", "total"]
    assert len(cheap_cuts(graph, 2)) == 2


@pytest.mark.parametrize("record", ["", "[]", "{", '{"x": 1}', '"other"', "null"])
def test_a_damaged_record_of_a_plan(record: str) -> None:
    graph = json.loads(memonger.search_plan(net(), shapes=SHAPES).tojson())
    node = next(n for n in graph["nodes"] if n["op"] != "null")
    node["attrs"]["__memonger__"] = record
    damaged = mx.sym.load_json(json.dumps(graph))
    for call in (memonger.unplan, lambda symbol: memonger.plan(symbol, SHAPES, how="marks")):
        with pytest.raises(memonger.MemongerError, match="no plan writes"):
            call(damaged)


def test_a_node_that_no_plan_has_put_in() -> None:
    x = mx.sym.ones((2, 3)) + mx.sym.Variable("data")
    graph = json.loads(x.tojson())
    next(n for n in graph["nodes"] if n["op"] == "_ones")["attrs"]["__memonger__"] = '"inserted"'
    with pytest.raises(memonger.MemongerError, match="for its own use"):
        memonger.unplan(mx.sym.load_json(json.dumps(graph)))


def test_operators_that_mxnet_merges_share_one_mark() -> None:
    """Also where a rule keeps one of them: with other marks MXNet would not merge them."""
    x = S.Variable("data")
    for k in range(4):
        gamma, beta = S.Variable(f"gamma{k}"), S.Variable(f"beta{k}")
        x = S.FullyConnected(x, num_hidden=8, name=f"fc{k}")
        twins = [S.LayerNorm(x, gamma, beta, name=f"{name}{k}") for name in ("one", "other")]
        x = S.tanh(twins[0]) + S.sigmoid(twins[1])
    rules = rules_of(S.MakeLoss(x), {"data": (4, 8)})
    same, random = np.array(rules.trainings[0].same), np.random.RandomState(0)
    assert (same != np.arange(len(same))).sum() == 4
    kept = 0
    for _ in range(100):
        mask = (random.uniform(size=len(same)) < 0.7) & rules.recomputable
        mask &= mask[same]
        applied = mask.copy()
        compiled.apply_rules(rules.arrays[0], applied)  # once, as in a search
        assert (applied == applied[same]).all()
        kept += int((mask & ~applied).sum())
    assert kept > 0


# -- saved identities ---------------------------------------------------------------------------


def gate() -> Any:
    """Return a product of two results, which pointwise fusion would take."""
    x = S.Variable("data")
    a = S.FullyConnected(x, num_hidden=64, name="a")
    b = S.FullyConnected(x, num_hidden=64, name="b")
    product = S.elemwise_mul(a, b, name="product")
    return S.LinearRegressionOutput(S.FullyConnected(product, num_hidden=2, name="fc"), name="out")


def test_only_what_nobody_else_reads_is_tied() -> None:
    rules = rules_of(gate(), {"data": (4, 8)})
    ties = {rules.graph.nodes[copy.node].name: copy.tied_dtype for copy in list_identities(rules)}
    assert ties == {"a": "", "b": "", "product": "float32", "fc": ""}
    cpu = rules_of(gate(), {"data": (4, 8)}, frozenset((CPU,)))
    assert not any(copy.tied_dtype for copy in list_identities(cpu))


def test_an_output_of_the_network_has_no_identity() -> None:
    """Its gradient and that of its readers are added up: an identity would change the order."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=8, name="a")
    x = S.FullyConnected(x, num_hidden=8, name="b")
    loss = S.MakeLoss(S.FullyConnected(x, num_hidden=8, name="c"))
    for symbol, expected in ((loss, {"a", "b", "c"}), (S.Group([loss, x]), {"a", "c"})):
        rules = rules_of(symbol, {"data": (4, 8)})
        assert {rules.graph.nodes[k.node].name for k in list_identities(rules)} == expected


def test_a_tie_keeps_the_rules_content() -> None:
    """Without it the product would be kept, and with it what it was computed from."""
    rules = rules_of(gate(), {"data": (4, 8)})
    product = [node.name for node in rules.graph.nodes].index("product")
    for tie, recomputed in (("", False), ("float32", True)):
        plan, *_ = drop_unused_identities(
            rules, MarkPlan(rules.recomputable, (SavedIdentity(product, tie),))
        )
        assert plan.mask[product] == bool(plan.identities) == recomputed


def test_copies_avoid_names_that_are_taken() -> None:
    names = ["x", "x_keep", "y", "y_tie_keep"]
    behind = insert_identities(names, [SavedIdentity(0), SavedIdentity(2, "float32")]).behind
    assert [name for name, *_ in behind[0]] == ["x_1_keep"]
    assert [name for name, *_ in behind[2]] == ["y_one_keep", "y_tie_1_keep", "y_keep"]


def test_only_plans_for_fusion_alone_have_unfused_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKLDNN's inference would run a convolution and what is behind such a copy apart."""
    monkeypatch.setenv("MXNET_USE_FUSION", "1")
    for device, expected in (("gpu", True), ("cpu", False), ("any", False)):
        copies = list_identities(rules_of(gate(), {"data": (4, 8)}, targets_of(device)))
        assert copies and all(copy.unfused == expected for copy in copies)
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    copies = list_identities(rules_of(gate(), {"data": (4, 8)}, targets_of("gpu")))
    assert copies and not any(copy.unfused for copy in copies)


def rnn() -> tuple[Any, Any]:
    """Build cells whose states begin as zeros of a batch that MXNet infers."""
    steps, _ = mx.rnn.LSTMCell(8, prefix="").unroll(3, S.Variable("data"), merge_outputs=True)
    net = S.LinearRegressionOutput(S.FullyConnected(steps, num_hidden=2), name="out")
    return net, {"data": (4, 3, 5)}


def test_unfused_copies_leave_shapes_to_be_inferred() -> None:
    symbol, shapes = rnn()
    names = [node["name"] for node in nodes(symbol)]
    products = ("t0_i2h", "t0_h2h", "t1_h2h")
    copies = [SavedIdentity(names.index(name), "", True) for name in products]
    mask = np.zeros(len(names), dtype=np.bool_)
    with pytest.raises(mx.MXNetError, match="t0_h2h_keep"):
        marks.write(symbol, mask, (), copies).infer_shape(**shapes)
    left = marks.make_inferable(symbol, copies, shapes)
    assert [copy.unfused for copy in left] == [True, False, True]
    planned = marks.write(symbol, mask, (), left)
    assert planned.infer_shape(**shapes) == symbol.infer_shape(**shapes)
    assert memonger.unplan(planned).tojson() == symbol.tojson()


def test_ties_in_float64_change_no_bit() -> None:
    symbol, shapes, types = gate(), {"data": (4, 8)}, {"data": "float64"}
    mask = np.array([n.op == "elemwise_mul" for n in forward(symbol, shapes, types).nodes])
    product = int(mask.argmax())
    for unfused in (False, True):
        planned = marks.write(symbol, mask, (), [SavedIdentity(product, "float64", unfused)])
        assert memonger.check(symbol, planned, shapes, type_dict=types)
