"""What is told of a plan and of a network: read off the replay, so it adds up to the byte."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import pytest
from memonger.show.groups import Member, find_groups
from memonger.graph.forward import SavedIdentity, with_identities
from memonger.graph.training import training_graph
from memonger.support.errors import MemongerError

import networks
from planned import HOWS, forward, nodes, png_size
from zoo import TINY


S = mx.sym
MB = 2**20
CHAIN: Any = networks.chain(16)
SMALL: Any = networks.chain(16, hidden=64, batch=4096)


def test_a_chain_has_its_peak_at_the_first_gradient() -> None:
    """At the first gradient: two results of each of 16 layers, the output, and its gradient."""
    symbol, shapes = CHAIN
    explanation = memonger.explain(symbol, shapes)
    assert explanation.pool_bytes == memonger.pool_bytes(symbol, shapes=shapes)
    assert explanation.peak_bytes == 34 * MB == sum(t.nbytes for t in explanation.tensors)
    assert explanation.peak == "the gradient of 'out' (LinearRegressionOutput)"
    assert [t.kind for t in explanation.tensors].count("gradient") == 1
    assert sorted(t.name for t in explanation.tensors if t.kind == "result") == sorted(
        ["out"] + [f"{name}{i}" for name in ("fc", "tanh") for i in range(16)]
    )
    assert explanation.floor_bytes == 4 * MB and "'tanh15' (Activation)" in explanation.bounded_by
    text = str(explanation)
    assert "peak       34.0 MiB alive at once, in the gradient of 'out'" in text
    assert "  16.0 MiB  result      16 x Activation of 'tanh*'\n" in text
    assert len(explanation.details().splitlines()) - len(text.splitlines()) == 34 - 4


@pytest.fixture(scope="module", params=["marks", "schedule"])
def planned(request: Any) -> memonger.Plan:
    work = {"schedule": 2.0}.get(request.param)  # without a limit it keeps nothing at a cut
    return memonger.plan(*SMALL, how=request.param, work=work)


def test_a_planned_network_is_explained_with_its_plan(planned: memonger.Plan) -> None:
    explanation = memonger.explain(planned.symbol, SMALL[1])
    assert (
        explanation.peak_bytes == planned.peak_bytes == sum(t.nbytes for t in explanation.tensors)
    )
    assert explanation.pool_bytes == planned.pool_bytes
    assert explanation.floor_bytes == planned.floor_bytes and planned.floor in str(explanation)


def test_what_must_not_be_computed_again_is_told() -> None:
    x = S.Dropout(S.FullyConnected(S.Variable("data"), num_hidden=64, name="fc"), name="drop")
    explanation = memonger.explain(S.SoftmaxOutput(x, name="softmax"), {"data": (1024, 64)})
    ruled = {t.name: t.rule for t in explanation.tensors if t.rule}
    assert "drop[1]" in ruled and "mask" in ruled["drop[1]"]
    assert "must not be recomputed" in explanation.bounded_by


def test_a_warning_tells_what_makes_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    x = S.Activation(S.Variable("data"), act_type="tanh")
    for _ in range(24):
        x = S.Dropout(x, p=0.5)
    symbol = S.LinearRegressionOutput(x, name="out")
    plan = memonger.plan(symbol, {"data": (256, 64)}, how="marks")
    assert plan.pool_bytes > 0.95 * plan.unplanned_bytes
    said = "; 1.5 MiB must not be recomputed (24 Dropout), and the gradient"
    assert said in caplog.text


def branches(ways: int = 2, depth: int = 6) -> Any:
    """Build an output without a loss, with whose gradient the most is alive."""
    x = S.elemwise_add(S.Variable("a"), S.Variable("b"), name="both")
    for i in range(depth):
        branch = S.tanh(x, name=f"tanh{i}")
        for k in range(ways):
            other = S.sigmoid(x if k == 0 else k * x, name=f"sigmoid{i}_{k}")
            branch = S.elemwise_add(branch, other, name=f"sum{i}_{k}")
        x = branch
    return x


SAME: Any = {"a": (64, 64), "b": (64, 64)}


def names_of(symbol: Any) -> set[str]:
    """Return all names that a network has: of its nodes, and of their outputs."""
    return {node["name"] for node in nodes(symbol)} | set(symbol.get_internals().list_outputs())


def test_all_that_runs_is_told_in_names_of_the_network() -> None:
    symbol = S.Group([branches(), branches(8, 1), S.BlockGrad(branches(3, 1))])
    graph = forward(symbol, SAME)
    both = [node.name for node in graph.nodes].index("both")
    copied, _ = with_identities(graph, [SavedIdentity(both, "float32")])
    training = training_graph(copied)
    descriptions = {training.describe(row) for row in range(len(training.ops))}
    assert {name for text in descriptions for name in re.findall("'(.*?)'", text)} <= names_of(
        symbol
    )
    assert descriptions > {
        "'both' (elemwise_add)",
        "'both' (elemwise_add), recomputed",
        "the saved identity of 'both'",
        "the gradient of the saved identity of 'both'",
        "the gradient of 'tanh0' (tanh)",
        "the gradient of 'sum5_1_output'",  # an output
        "the sum of the gradients of 'sum4_1_output'",
        "the gradient of 'b'",  # a copy of that of a
    }


@pytest.mark.parametrize("how", HOWS)
def test_an_error_has_no_names_but_those_of_the_network(how: str) -> None:
    symbol = branches()
    with pytest.raises(memonger.BudgetError) as caught:
        memonger.plan(symbol, SAME, budget=1, **HOWS[how])
    message = str(caught.value)
    # A schedule copies no gradients of outputs.
    peak = {"marks": "the gradient of 'sum5_1_output'", "schedule": "'sum5_0' (elemwise_add)"}
    assert re.search(rf"Its peak of [\d.]+ KiB is in {re.escape(peak[how])}", message)
    assert set(re.findall("'(.*?)'", message)) <= names_of(symbol)
    plan = memonger.plan(symbol, SAME, **HOWS[how])
    alive = {t.name for t in memonger.explain(plan.symbol, SAME).tensors}
    last = {"marks": "sum5_1_output", "schedule": "sum5_0"}
    assert last[how] in alive <= names_of(plan.symbol)


def test_a_plan_is_drawn_where_it_can_be_written(planned: memonger.Plan, tmp_path: Path) -> None:
    planned.plot(tmp_path / "plan.png")
    assert png_size(tmp_path / "plan.png") == [1200, 800]
    for wrong in (tmp_path / "no such folder" / "plan.png", tmp_path / "plan.xyz"):
        with pytest.raises(MemongerError, match="cannot be written"):
            planned.plot(wrong)


def test_a_picture_without_matplotlib_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = memonger.plan(*networks.chain(4, hidden=8, batch=8), how="marks")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MemongerError, match="pip install"):
        plan.plot(tmp_path / "plan.png")


def test_every_tensor_of_a_plan_is_told_with_a_reason(planned: memonger.Plan) -> None:
    plan, tensors = planned, planned.explain().tensors
    names = [f"{name}{i}" for i in range(16) for name in ("fc", "tanh")] + ["out"]
    assert [t.name for t in tensors if t.name not in plan.copies] == names
    assert {t.nbytes for t in tensors} == {MB}
    assert {t.name for t in tensors if t.times > 1} - set(plan.copies) == set(plan.recomputed)
    kept = [t for t in tensors if t.choice == "kept"]
    assert [t.name for t in kept if t.why == "output"] == ["out"]
    reasons = [t.reason for t in kept if t.why == "cut"]
    assert reasons and all("recomputed from it" in reason for reason in reasons)
    assert all(t.why and t.reason for t in kept)
    assert not any(t.why for t in tensors if t.choice != "kept")
    assert len(kept) * MB <= plan.peak_bytes
    text = str(plan.explain())
    assert f"{'kept':10} {len(kept)}.0 MiB, {len(kept)} tensors" in text
    assert len(plan.explain().details().splitlines()) == 5 + len(tensors)
    assert len(text.splitlines()) == 5 + len(plan.explain().groups) < 20


#: What is alike: names of one operator of one shape, and what they are told as.
ALIKE: list[tuple[list[tuple[str, str, int]], list[str]]] = [
    (
        [
            (f"stage{s}_unit{u}_{layer}", op, 100 - 10 * s)
            for s in (2, 3)
            for u in range(1, 17)
            for layer, op in (("bn1", "BatchNorm"), ("relu1", "Activation"), ("bn2", "BatchNorm"))
        ],
        [
            "32 x BatchNorm and 16 x Activation of 'stage2_unit*'",
            "32 x BatchNorm and 16 x Activation of 'stage3_unit*'",
        ],
    ),
    (
        [(f"resnetv10_stage3_batchnorm{k}_fwd", "BatchNorm", 10 - k) for k in range(4)],
        ["4 x BatchNorm of 'resnetv10_stage3_batchnorm*_fwd'"],
    ),
    (
        [("activation9", "Activation", 8), ("activation10", "Activation", 8), ("fc", "dot", 1)],
        ["2 x Activation of 'activation*'", "dot of 'fc'"],
    ),
    (
        [(f"lstm_l{i}_t{t}_h2h", "dot", 8) for t in range(20) for i in (0, 1)],
        ["40 x dot of 'lstm_l*_t*_h2h'"],
    ),
    ([(f"t{t}_l0_h2h", "dot", 8) for t in range(20)], ["20 x dot of 't*_l0_h2h'"]),
    (
        [(f"slice{k}{output}", "Slice", 8) for k in range(3) for output in ("", "[1]", "[2]")],
        ["3 x Slice of 'slice*'"],
    ),
    (
        [("a*2", "tanh", 8), ("a12", "tanh", 4), ("a1", "tanh", 2)],
        ["tanh of 'a*2'", "2 x tanh of 'a*'"],
    ),
    (
        [("12", "tanh", 8), ("a", "tanh", 4), ("", "tanh", 2)],
        [f"tanh of {x!r}" for x in ("12", "a", "")],
    ),
    ([], []),
]


@pytest.mark.parametrize(("tensors", "groups"), ALIKE)
def test_what_differs_in_numbers_is_told_once(tensors: Any, groups: Any) -> None:
    members = [Member(name, op, (size,), size, "kept", "cut") for name, op, size in tensors]
    assert [str(group) for group in find_groups(members)] == groups
    other = [member._replace(choice="freed", why="") for member in members]
    apart = find_groups([*members, *other])
    assert len(apart) == 2 * len(groups)
    assert all({k // len(members) for k in g.members} == {g.choice == "freed"} for g in apart)


@pytest.mark.parametrize("name", ["resnet", "lstm", "transformer", "cells"])
@pytest.mark.parametrize("how", HOWS)
def test_groups_have_all_tensors_and_their_bytes(name: str, how: str) -> None:
    symbol, shapes = TINY[name]()
    plan = memonger.plan(symbol, shapes, patience=0.01, **HOWS[how])
    for explanation in (plan.explain(), memonger.explain(symbol, shapes)):
        tensors, groups = explanation.tensors, explanation.groups
        assert sorted(k for group in groups for k in group.members) == [*range(len(tensors))]
        assert len(groups) < len(tensors) / 2
        for group in groups:
            members = [tensors[k] for k in group.members]
            assert group.nbytes == sum(t.nbytes for t in members)
            begin = re.escape(group.name.split("*")[0])
            assert all(re.match(begin + r"\d" * ("*" in group.name), t.name) for t in members)
            assert {t[2 if len(t) == 6 else 3] for t in members} == {group.choice}
            counts = [int(n) for n in re.findall("([0-9]+) x", group.operators)] or [1]
            assert max(counts) <= len(members)
        nbytes = [group.nbytes for group in groups]
        assert nbytes == sorted(nbytes, reverse=True)
        assert sum(nbytes) == sum(t.nbytes for t in tensors)


def test_rules_tell_their_reasons() -> None:
    plan = memonger.plan(*SMALL, until="fc9", how="marks")
    late = {t.name: (t.why, t.reason) for t in plan.explain().tensors}["tanh12"]
    assert late == ("you", "it does not come before 'fc9'")
    x = S.Variable("data")
    for i in range(12):
        x = S.Activation(S.FullyConnected(x, num_hidden=64, name=f"fc{i}"), act_type="tanh")
        x = S.Dropout(x, p=0.5, name=f"drop{i}") if i == 5 else x
    plan = memonger.plan(S.LinearRegressionOutput(x, name="out"), {"data": (4096, 64)}, how="marks")
    reasons = {t.name: t.reason for t in plan.explain().tensors if t.why == "rule"}
    assert "its mask is kept" in reasons["drop5[1]"]


def test_what_a_budget_allows_is_kept_for_the_time() -> None:
    plan = memonger.plan(*CHAIN, budget="60%", how="marks")
    assert plan.time_overhead and f"{100 * plan.time_overhead:.1f} % of the time" in str(plan)
    reasons = {t.reason for t in plan.explain().tensors if t.why == "budget"}
    assert reasons == {"the budget allows it, and recomputing it takes time"}
    assert (
        len(str(plan).splitlines()) == 15 and str(plan).count(" of 'tanh*': kept (budget), ") == 1
    )
    smallest = memonger.plan(*CHAIN, how="marks")
    assert not any(t.why == "budget" for t in smallest.explain().tensors)


@pytest.mark.parametrize("name", [name for name in memonger.__all__ if name[0].islower()])
def test_every_parameter_is_told(name: str) -> None:
    call = getattr(memonger, name)
    text = inspect.getdoc(call) or ""
    sections = dict(re.findall(r"^(\w+)\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", text, re.M | re.S))
    parameters = inspect.signature(call).parameters.values()
    wanted = {"Parameters", "Returns", "Raises", "Examples"} if parameters else {"Examples"}
    assert wanted <= set(sections)
    entries = re.findall(r"^(\S.*)$", sections.get("Parameters", ""), re.M)
    documented = [entry for line in entries for entry in line.split(" : ")[0].split(", ")]
    names = [("**" if p.kind is p.VAR_KEYWORD else "") + p.name for p in parameters]
    assert sorted(documented) == sorted(names)
    assert not re.search(r"^ *As for", text, re.M)
    assert text.split()[0] not in ("The", "A", "An", "What", "Is", "Whether")
    assert not text.split()[0].endswith("s")
