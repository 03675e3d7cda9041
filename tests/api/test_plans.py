"""``memonger.plan``: what a Plan tells is what MXNet does, whatever is asked for."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.api.plan import make_plan
from memonger.costs.bind import read_planned_mb
from memonger.planners.candidates import Candidate, MarkPlan, SearchResult
from memonger.solve.choose import choose_from
from memonger.solve.facts import Facts
from memonger.costs.bind import confirm_pool
from memonger.solve.limits import Limits
from memonger.solve.network import read_unplanned
from memonger.solve.search import search
from memonger.support.errors import format_size

import networks
from blocks import TwoInputs
from networks.mixed import KINDS
from planned import as_module, marked, nodes


S = mx.sym
MB = 2**20
SHAPES: Any = {"data": (256, 512)}


def net(layers: int = 8) -> Any:
    x = S.Variable("data")
    for i in range(layers):
        x = S.FullyConnected(x, num_hidden=512, name=f"fc{i}")
        x = S.Activation(S.BatchNorm(x, name=f"bn{i}"), act_type="tanh", name=f"tanh{i}")
    return S.LinearRegressionOutput(x, name="out")


def small_resnet(batch: int = 8) -> Any:
    return networks.resnet((1, 1, 1, 1), batch=batch, image=64, classes=10, filters=16)


def test_figures_of_a_plan_are_what_mxnet_plans() -> None:
    symbol = net()
    plan = memonger.plan(symbol, SHAPES, how="marks")
    assert plan.exact and not plan.interrupted
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=SHAPES)
    assert plan.pool_bytes == memonger.pool_bytes(plan.symbol, shapes=SHAPES)
    assert plan.unplanned_bytes == memonger.pool_bytes(symbol, shapes=SHAPES)
    assert 0 < plan.peak_bytes <= plan.pool_bytes < plan.unplanned_bytes
    assert plan.candidates["no plan"] == plan.unplanned_bytes
    assert plan.counted_bytes == plan.candidates[plan.planner] == min(plan.candidates.values())
    assert memonger.check(symbol, plan.symbol, SHAPES)
    operators = [n["name"] for n in nodes(symbol) if n["op"] != "null"]
    assert list(plan.recomputed) == [n for n in operators if n in marked(plan.symbol)]
    assert list(plan.kept) == [n for n in operators if n not in plan.recomputed]


@pytest.mark.parametrize("how", ["marks", "schedule", "auto"])
def test_a_wrong_gradient_of_mxnet_is_named(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """MXNet adds to the sum of eight gradients in place, which ``clip`` cannot do."""
    x = S.tanh(S.FullyConnected(S.Variable("data"), num_hidden=64))
    rows = [S.sin(S.FullyConnected(x, num_hidden=64)) for _ in range(7)]
    for others, warned in ((rows[1:], False), (rows, True)):
        caplog.clear()
        symbol = S.MakeLoss(S.add_n(S.clip(x, -0.5, 0.5, name="limit"), *others))
        memonger.plan(symbol, {"data": (64, 64)}, patience=0.02, how=how)
        text = r"wrong gradients.* 'limit' \(clip\).*set MXNET_EXEC_INPLACE_GRAD_SUM_CAP=9 before"
        assert bool(re.search(text, caplog.text)) == warned


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_small_network_is_planned_with_little_effort(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket of an LSTM trains an epoch in seconds; whoever asks for more effort gets it."""
    caplog.set_level(logging.INFO, "memonger")
    small = memonger.plan(*networks.chain(16, hidden=64, batch=512), how=how)
    text = "the network takes %s without a plan, less than 16.0 MiB: planning with patience=0.05"
    assert text % format_size(small.unplanned_bytes) in caplog.text
    assert small.recomputed and "patience" not in small.options
    short = memonger.plan(*networks.chain(16, hidden=64, batch=512), how=how, patience=0.05)
    assert short.recomputed == small.recomputed and short.pool_bytes == small.pool_bytes
    for batch, patience, expected in ((8000, None, 1.0), (8000, 0.2, 0.2), (512, 2.0, 2.0)):
        symbol, shapes = networks.chain(16, hidden=64, batch=batch)
        request = read_unplanned(symbol, shapes)
        assert Facts(request, Limits(how=how, patience=patience)).patience == expected
    assert caplog.text.count("planning with patience") == 1


def test_an_error_that_is_not_of_schedules_is_not_taken_for_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With marks instead, nobody would see it."""

    def fail(*_: Any) -> Any:
        raise memonger.MemongerError("a count exceeds an int32")

    monkeypatch.setattr("memonger.solve.facts.make_parts", fail)
    with pytest.raises(memonger.MemongerError, match="exceeds an int32"):
        memonger.plan(net(), SHAPES)


def test_recomputed_work_is_counted_by_operator() -> None:
    """A product is 2 x 256 x 512 x 512 + 256 x 512 operations; all other operators are cheap."""
    plan = memonger.plan(net(), SHAPES, how="marks")
    again = [n for n in plan.recomputed if n.startswith("fc")]
    assert plan.recomputed and abs(plan.recompute_overhead - len(again) / 8) < 0.02
    everything = memonger.plan(net(), SHAPES, planner="chen2016")
    assert len(everything.recomputed) == 25 and 0.98 < everything.recompute_overhead <= 1
    double = memonger.plan(net(), SHAPES, type_dict={"data": "float64"}, how="marks")
    assert double.exact and double.unplanned_bytes == 2 * plan.unplanned_bytes
    assert double.pool_bytes == 2 * double.counted_bytes


def test_a_plan_prints_what_counts_is_frozen_and_pickles() -> None:
    plan = memonger.plan(net(), SHAPES, how="marks")
    text = str(plan)
    device = f"{plan.device_bytes / MB:.1f} MiB, "
    device += f"{plan.unplanned_device_bytes / MB:.1f} MiB"
    for words in (
        f"before     {plan.unplanned_bytes / MB:.1f} MiB",
        f"after      {plan.pool_bytes / MB:.1f} MiB",
        f"floor      {plan.floor_bytes / MB:.1f} MiB",
        "the gradient of ",
        plan.slowest,
        device + " without",
        f"{len(plan.recomputed)} of 25 operators",
        f"{100 * plan.recompute_overhead:.0f} % of the forward FLOPs are recomputed",
        plan.planner,
    ):
        assert words in text, text
    assert plan.slowest and len(text.splitlines()) == 15 and "\nlargest    " in text
    assert repr(plan).startswith(f"Plan(pool_bytes={plan.pool_bytes}, ")
    assert plan.time_overhead == plan.predict_time() > 0
    with pytest.raises(AttributeError):
        plan.pool_bytes = 0  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(plan))
    assert again.symbol.tojson() == plan.symbol.tojson() and str(again) == text


DEVICES = [
    (None, "any", "any device"),  # where MXNet has no CUDA
    ("gpu", "gpu", "any GPU; on a CPU it may round"),
    ("cpu", mx.cpu(), "cpu(0)"),
    (mx.cpu(), mx.cpu(), "cpu(0)"),
]


@pytest.mark.parametrize("how", ["marks", "schedule"])
@pytest.mark.parametrize("ctx, expected, words", DEVICES)
def test_a_plan_tells_for_which_devices_it_is(
    ctx: Any, expected: Any, words: str, how: str, tmp_path: Path
) -> None:
    symbol, shapes = KINDS["SE-ResNet"]()
    plan = memonger.plan(symbol, shapes, ctx=ctx, how=how)
    assert plan.exact and plan.request.ctx == expected
    assert f"\nfor        {words}" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert memonger.load_plan(tmp_path / "plan.json").request.ctx == expected
    for network, nbytes in (
        (plan.symbol, plan.counted_bytes),
        (symbol, plan.candidates["no plan"]),
    ):
        assert memonger.get_cost(network, shapes=shapes, ctx=ctx) == nbytes // MB


def test_search_plan_gives_the_same_symbol() -> None:
    options: Any = {"until": "tanh5", "devices": 2, "grad_req": "add"}
    symbol = memonger.search_plan(net(), shapes=SHAPES, **options)
    plain = memonger.search_plan(net(), **SHAPES)
    assert symbol.tojson() == memonger.plan(net(), SHAPES, how="marks", **options).symbol.tojson()
    assert (
        symbol.tojson()
        != plain.tojson()
        == memonger.plan(net(), how="marks", **SHAPES).symbol.tojson()
    )


def test_a_network_that_no_plan_helps_is_returned_unmarked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    symbol = S.Dropout(S.Dropout(S.Variable("data"), p=0.5), p=0.5)
    for _ in range(2):  # the second comes from the cache
        caplog.clear()
        plan = memonger.plan(symbol, {"data": (64, 4096)}, how="marks")
        assert plan.planner == "no plan" and not plan.recomputed
        assert plan.pool_bytes == plan.unplanned_bytes and plan.recompute_overhead == 0
        assert plan.symbol.tojson() == symbol.tojson()
        assert (
            "no plan saves memory" in caplog.text and "every operator must be kept" in caplog.text
        )


def test_the_original_planner_says_that_it_makes_it_worse(caplog: pytest.LogCaptureFixture) -> None:
    symbol, shapes = networks.model_zoo("densenet121", 4)
    plan = memonger.plan(symbol, shapes, planner="chen2016")
    assert plan.planner == "chen2016"
    assert plan.counted_bytes == plan.candidates["chen2016"] > plan.candidates["no plan"]
    assert "more memory" in caplog.text and "no mirror_stage marks" in caplog.text


def test_a_network_that_cannot_be_replayed_has_the_figures_of_a_bind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNVM_EXEC_NUM_TEMP", "2")
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=8)
    caplog.set_level("INFO", "memonger")
    plan = memonger.plan(symbol, shapes, how="marks")
    assert not plan.exact and "known to the MiB" in str(plan)
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=shapes)
    assert plan.peak_bytes <= plan.pool_bytes < plan.device_bytes
    assert plan.recomputed and plan.pool_bytes < plan.unplanned_bytes
    assert "known to the MiB only" in caplog.text and "NNVM_EXEC_NUM_TEMP" in caplog.text


def test_no_pool_is_told_smaller_than_what_is_alive_in_it() -> None:
    """MXNet merges the outputs, which the replay does not."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=256, name="fc")
    symbol, shapes = mx.sym.Group([mx.sym.tanh(x * 2) for _ in range(8)]), {"data": (1024, 256)}
    plan, memory = memonger.plan(symbol, shapes, how="marks"), memonger.explain(symbol, shapes)
    assert not plan.exact and memory.inexact
    for figures in plan, memory:
        assert 0 < figures.peak_bytes <= figures.pool_bytes
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=shapes)


def test_a_mark_never_reaches_a_custom_operator() -> None:
    symbol, shapes = networks.detection(batch=2, image=64, filters=16, blocks=2, scales=3)
    plan = memonger.plan(symbol, shapes, patience=0.05, how="marks")
    assert plan.exact and plan.recomputed
    # It finds no mirror_stage to keep, and so recomputes all that it may.
    bare = memonger.make_mirror_plan(symbol, 0, shapes=shapes)
    (attributes,) = (n["attrs"] for n in nodes(symbol) if n["op"] == "Custom")
    for planned in (plan.symbol, bare):
        # Any other attribute would reach the operator's Python constructor.
        assert [n["attrs"] for n in nodes(planned) if n["op"] == "Custom"] == [attributes]
        assert any(name.startswith("convolution") for name in marked(planned))
        assert memonger.check(symbol, planned, shapes, grad_req=as_module(symbol, shapes))


def test_a_plan_that_saves_less_than_its_search_believes_is_not_taken() -> None:
    """A layer that is recomputed for nothing, and that a search believes to cost nothing."""
    facts = Facts(read_unplanned(net(), SHAPES), Limits(how="marks"))
    mask = np.array([node.name == "tanh7" for node in facts.graph.nodes])
    believed = Candidate(MarkPlan(mask), 0, 0.0, "a belief")
    solution = choose_from(facts, SearchResult([believed], interrupted=False, way="marks"))
    plan, said = make_plan(solution), "; ".join(solution.warnings)
    assert not plan.recomputed and plan.planner == "no plan" and "no plan saves memory" in said
    assert plan.pool_bytes == plan.unplanned_bytes


def test_a_wrong_prediction_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet plans 1 MB more than the replay tells: the figures are MXNet's, and it is said."""

    def bind(*arguments: Any) -> Any:
        memory = confirm_pool(*arguments)
        return dataclasses.replace(memory, bound=memory.bound + 1)

    monkeypatch.setattr("memonger.solve.by_marks.confirm_pool", bind)
    facts = Facts(read_unplanned(net(), SHAPES), Limits(how="marks"))
    solution = choose_from(facts, search(facts))
    plan, said = make_plan(solution), "; ".join(solution.warnings)
    assert not plan.exact and plan.recomputed and "was predicted as" in said
    assert plan.counted_bytes == MB * (1 + memonger.get_cost(plan.symbol, shapes=SHAPES))


INPUTS = ("data", "softmax_label")
REQUESTS: dict[str, Any] = {
    "write": lambda names: "write",
    "add": lambda names: "add",
    "parameters": lambda names: {n: "write" for n in names if n not in INPUTS},
    "parameters, added": lambda names: ["null" if n in INPUTS else "add" for n in names],
    "last layer": lambda names: {n: "write" for n in names if n.startswith("fc")},
    "mixed": lambda names: [("write", "add", "null")[k % 3] for k in range(len(names))],
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_plan_is_exact_for_the_gradients_that_are_asked_for(case: str) -> None:
    symbol, shapes = small_resnet()
    grad_req = REQUESTS[case](symbol.list_arguments())
    plan = memonger.plan(symbol, shapes, grad_req=grad_req, how="marks")
    assert plan.exact
    for net, counted in ((plan.symbol, plan.counted_bytes), (symbol, plan.unplanned_bytes)):
        executor = net.simple_bind(mx.cpu(), grad_req=grad_req, **shapes)
        assert read_planned_mb(executor) == counted // MB
    # The plan is right for other gradients too.
    small = {name: (2, *shape[1:]) for name, shape in shapes.items()}
    for other in (grad_req, "write", None):
        assert memonger.check(symbol, plan.symbol, small, grad_req=other)


@pytest.mark.parametrize(
    "options",
    [
        {"how": "schedule", "work": 3.0},
        {"planner": "smallest"},
        {"planner": "chen2016"},
    ],
    ids=str,
)
def test_what_comes_after_a_layer_is_kept(options: dict[str, Any]) -> None:
    symbol = net(16)
    order = [n["name"] for n in nodes(symbol)]
    for until, first in (("bn8_output", "bn8"), ("fc12", "fc12")):
        plan = memonger.plan(symbol, SHAPES, until=until, **{"how": "marks", **options})
        assert plan.recomputed
        assert all(order.index(name) < order.index(first) for name in plan.recomputed)
    free = memonger.plan(symbol, SHAPES, **{"how": "marks", **options})
    assert any(order.index(name) > order.index("fc12") for name in free.recomputed)


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_gluon_block_that_was_cast_is_planned_in_its_type(how: str) -> None:
    """Its variables keep the type of before, by which MXNet refuses the one that is given."""
    block = mx.gluon.nn.HybridSequential()
    for _ in range(6):
        block.add(mx.gluon.nn.Dense(64, activation="tanh", in_units=64))
    block(mx.sym.var("data"))
    block.cast("float64")
    cast, shapes, types = block(mx.sym.var("data")), {"data": (512, 64)}, {"data": "float64"}
    with pytest.raises(RuntimeError, match="expected float64, got float32"):
        cast.simple_bind(mx.cpu(), type_dict=types, **shapes)
    plan = memonger.plan(cast, shapes, type_dict=types, how=how, patience=0.02)
    all_types = dict.fromkeys(cast.list_arguments(), "float64")
    same = memonger.plan(cast, shapes, type_dict=all_types, how=how, patience=0.02)
    assert plan.recomputed and plan.pool_bytes == same.pool_bytes < plan.unplanned_bytes
    assert memonger.check(cast, plan.symbol, shapes, type_dict=types)
    module = mx.mod.Module(plan.symbol, label_names=None)
    module.bind([mx.io.DataDesc("data", shapes["data"], "float64")])
    module.init_params(mx.init.Xavier())
    weights, _ = module.get_params()
    assert {array.dtype for array in weights.values()} == {np.float64}
    types[cast.list_arguments()[1]] = "float32"
    with pytest.raises(memonger.MemongerError, match="the types do not fit"):
        memonger.plan(cast, shapes, type_dict=types, how="marks")


def test_a_block_is_planned_with_the_types_that_it_has_now() -> None:
    """Gluon keeps the variables of a block that was called before it was cast."""
    blocks = [mx.gluon.nn.HybridSequential() for _ in range(2)]
    for k, block in enumerate(blocks):
        for _ in range(4):
            block.add(mx.gluon.nn.Dense(64, activation="tanh"))
        block.initialize()
        if k:
            memonger.plan(block, data=(128, 32), patience=0.02)
        block.cast("float16")
    given = {"data": (128, 32)}, {"data": "float16"}
    plans = [memonger.plan(block, given[0], patience=0.02) for block in blocks]
    plans.append(memonger.plan(blocks[1], given[0], type_dict=given[1], patience=0.02))
    assert len({plan.unplanned_bytes for plan in plans}) == 1
    assert len({plan.pool_bytes for plan in plans}) == 1


def test_types_of_variables_stay_where_nothing_contradicts() -> None:
    x = mx.sym.Cast(mx.sym.Variable("free", dtype="float64"), dtype="float32")
    for k in range(6):
        old = mx.sym.Variable(f"old{k}", dtype="float16")
        x = mx.sym.Activation(mx.sym.FullyConnected(x, old, num_hidden=16, no_bias=True), "tanh")
    shapes = {"free": (512, 16)}
    plan = memonger.plan(x, shapes, type_dict={"old0": "float32"}, patience=0.02, how="marks")
    kept = {name: a.get("__dtype__") for name, a in plan.symbol.attr_dict().items()}
    assert [kept["free"], kept.get("old0"), kept.get("old5")] == ["1", None, None]
    contradicted = dict.fromkeys(("old0", "old5"), "float16")
    with pytest.raises(memonger.MemongerError, match="the types do not fit"):
        memonger.plan(x, shapes, type_dict=contradicted, patience=0.02, how="marks")


def test_float16_within_a_network_is_inferred_as_by_module() -> None:
    """Data of float32 are cast, and the weights are what reads them."""
    x = mx.sym.Cast(mx.sym.Variable("data"), dtype="float16")
    for i in range(8):
        x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name=f"conv{i}")
        x = mx.sym.Activation(mx.sym.BatchNorm(x, name=f"bn{i}"), act_type="relu")
    x = mx.sym.Cast(mx.sym.FullyConnected(x, num_hidden=3, name="fc"), dtype="float32")
    symbol, shapes = mx.sym.SoftmaxOutput(x, name="softmax"), {"data": (4, 3, 16, 16)}
    plan = memonger.plan(symbol, shapes, how="marks")
    same = memonger.plan(symbol, shapes, type_dict={"data": "float32"}, how="marks")
    assert plan.recomputed == same.recomputed != ()
    assert (plan.pool_bytes, plan.exact) == (same.pool_bytes, True)
    assert memonger.pool_bytes(symbol, shapes=shapes) == plan.unplanned_bytes
    module = mx.mod.Module(plan.symbol)
    module.bind(list(shapes.items()), [("softmax_label", (4,))])
    assert module._exec_group.execs[0].arg_dict["conv0_weight"].dtype == np.float16


@pytest.mark.parametrize(
    ("until", "name"),
    [("bn1", "bn1"), ("n8", "bn8"), ("8", "fc8"), ("8_out", "fc8"), ("bn1?", "bn10"), ("", None)]
    + [("*8_output", "fc8"), ("t*1[45]", "tanh14")],
)
def test_a_layer_is_named_by_a_part_or_a_pattern(until: str, name: str | None) -> None:
    one, exact = (
        memonger.make_mirror_plan(net(16), 0, until=layer, shapes=SHAPES) for layer in (until, name)
    )
    assert one.tojson() == exact.tojson()


def test_search_plan_to_layer_is_search_plan_until_it() -> None:
    symbol = net(16)
    for layer, until in (("bn8", "bn8"), ("tanh1?", "tanh10"), ("", None), (None, None)):
        planned = memonger.search_plan_to_layer(symbol, layer, 1000, type_dict=None, **SHAPES)
        assert planned.tojson() == memonger.search_plan(symbol, until=until, **SHAPES).tojson()
    with pytest.raises(memonger.MemongerError, match="'bn88' matches no operator.*mean 'bn8'"):
        memonger.search_plan_to_layer(symbol, "bn88", **SHAPES)
    with pytest.raises(memonger.MemongerError, match="takes no until=; give layer_name="):
        memonger.search_plan_to_layer(symbol, until="bn8", **SHAPES)  # type: ignore[arg-type]
    with pytest.raises(memonger.MemongerError, match="takes no budget=; .*search_plan, with until"):
        memonger.search_plan_to_layer(symbol, "bn8", budget="60%", **SHAPES)  # type: ignore[arg-type]


def test_nothing_before_the_first_layer_can_be_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    planned = memonger.make_mirror_plan(net(), 0, until="tanh3", shapes=SHAPES)
    assert marked(planned) == [f"{n}{i}" for i in range(4) for n in ("fc", "bn", "tanh")][:-1]
    assert not memonger.plan(net(), SHAPES, until="fc0", how="marks").recomputed
    assert "no operator before 'fc0' (until=) may be recomputed" in caplog.text


@pytest.mark.parametrize("batch, devices, share", [(16, 2, 8), (10, 4, 4), (9, 4, 3)])
def test_devices_share_the_batch_as_module_splits_it(batch: int, devices: int, share: int) -> None:
    """As Module splits it: of 10 among 4 devices the last gets 4 (2, 2, 2, 4)."""
    symbol, whole = small_resnet(batch)
    grad_req = as_module(symbol, whole)
    plan = memonger.plan(symbol, whole, devices=devices, grad_req=grad_req, how="marks")
    small = {name: (share, *shape[1:]) for name, shape in whole.items()}
    alone = memonger.plan(symbol, small, grad_req=grad_req, how="marks")
    assert plan.pool_bytes == alone.pool_bytes
    assert plan.symbol.tojson() == alone.symbol.tojson()
    module = mx.mod.Module(plan.symbol, context=[mx.cpu(i) for i in range(devices)])
    module.bind([("data", whole["data"])], [("softmax_label", (batch,))])
    assert max(map(read_planned_mb, module._exec_group.execs)) == plan.counted_bytes // MB


def test_devices_split_the_batch_where_the_layout_has_it() -> None:
    """The batch is where the layout has its N, and an input without is not split."""
    Desc = mx.io.DataDesc
    shapes = [Desc("data", (6, 8, 4), layout="TNC"), Desc("shift", (1, 1, 4), layout="TC")]
    symbol = S.MakeLoss(S.broadcast_add(S.Variable("data"), S.Variable("shift")))
    request = read_unplanned(symbol, shapes, devices=4)
    assert request.spec.shapes == {"data": (6, 2, 4), "shift": (1, 1, 4)}


def test_the_figures_of_a_schedule_do_not_contradict_one_another() -> None:
    """The arena and the outputs, before and after; gradients have arrays of their own."""
    symbol, shapes = networks.chain(12, hidden=512, batch=4096)
    plan = memonger.plan(symbol, shapes, how="schedule", patience=0.02)
    assert plan.recomputed
    number = re.compile(r"\b\d+(?:\.\d)?(?= MiB| %)")
    lines = ([float(n) for n in number.findall(line)] for line in str(plan).splitlines())
    before, after, saved, floor, device, *_ = lines
    (whole,) = before
    assert saved[0] == pytest.approx(whole - after[0], abs=0.11)
    assert saved[1] == pytest.approx(100 * (1 - after[0] / whole), abs=0.6)
    assert whole > after[0] >= after[1] >= floor[0] > 10
    assert device[1] > whole and device[1] > device[0] > after[0]
    # Blocks are rounded up, so that a device may have to give more.
    assert device[1] - device[0] == pytest.approx(saved[0], rel=0.1)


def test_calls_take_a_gluon_block_by_the_shapes_of_its_inputs() -> None:
    """In the order of its call; the block stays as it is, and need not be initialized."""
    block, shapes = TwoInputs(prefix="net_"), {"x": (64, 20), "y": (64, 10)}
    first, others = block(S.var("x"), S.var("y"))
    symbol, quick = S.Group([first, *others]), partial(memonger.frontier, patience=0.02)
    for call in (memonger.plan, memonger.explain):
        assert str(call(block, shapes)) == str(call(symbol, shapes))
    pools = (memonger.pool_bytes(each, shapes=shapes) for each in (block, symbol))
    assert next(pools) == next(pools)
    assert str(quick(block, shapes)) == str(quick(symbol, shapes))
    largest = partial(memonger.largest_batch, budget="1MB", patience=0.02)
    batches = [largest(each, {"x": (None, 20), "y": (None, 10)}).batch for each in (block, symbol)]
    assert batches[0] == batches[1] > 1
    planned = memonger.plan(block, shapes, how="marks").symbol
    assert memonger.check(block, planned, shapes) and block._cached_op is None


def test_a_block_of_numpy_arrays_is_planned_as_its_symbol() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        block = mx.gluon.nn.HybridSequential()
        for _ in range(3):
            block.add(mx.gluon.nn.Dense(8, activation="tanh"))
        symbol = block(S.var("data").as_np_ndarray())
        for call in (memonger.plan, memonger.explain):
            assert str(call(block, data=(16, 4))) == str(call(symbol, data=(16, 4)))
