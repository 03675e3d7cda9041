"""Reports: what a page holds is what its Plans are; what is wrong is told; nothing is half written.

`tests/browser` looks at the pages in a browser.
"""

from __future__ import annotations

import re
import sys
import shlex
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger import MemongerError, cli
from memonger.costs.time.cpu import NOMINAL_CPU
from memonger.graph.inputs import InputSpec
from memonger.solve.facts import find_times, predict
from memonger.solve.network import Network, TimedDevice
from memonger.show.timeline import list_alive, list_operators

import networks
from pages import chain_plans, data_of, live_of

MB = 2**20


@pytest.fixture(scope="module")
def chain() -> Any:
    """Return a network, its shapes, its frontier, and a schedule."""
    return chain_plans()


def test_figures_in_a_page_are_those_of_the_plans(chain: Any, tmp_path: Path) -> None:
    _, _, plans, schedule = chain
    page = tmp_path / "plans.html"
    plans.report(page, others=[schedule, plans[0]], budget="60%", network="my-symbol.json")
    data, shown = data_of(page), [*plans, schedule]
    assert len(data["plans"]) == len(shown) == len(plans) + 1
    for entry in data["plans"]:
        figures = dict(entry["figures"])
        (plan,) = (p for p in shown if p.pool_bytes == figures["pool_bytes"])
        assert entry["text"] == str(plan)
        for name in ("kept", "recomputed", "copies"):
            assert figures.pop(name) == len(getattr(plan, name))
        assert figures.pop("time_overhead") == plan.predict_time()
        for name, value in figures.items():
            assert value == getattr(plan, name), name
        assert entry["timeline"]["peak_bytes"] == plan.peak_bytes
        kinds = {plans[0]: "none", schedule: "schedule"}
        assert entry["kind"] == kinds.get(plan, "marks") == plan.kind
    times = [entry["figures"]["time_overhead"] for entry in data["plans"]]
    assert times == sorted(times)
    limit = int(0.6 * plans[0].unplanned_bytes)
    assert data["budget"] == {"bytes": limit, "of": "pool", "state": 0, "room": 0}
    chosen = data["plans"][data["chosen"]]["figures"]["pool_bytes"]
    assert chosen == next(p.pool_bytes for p in plans if p.pool_bytes <= limit)


def test_tensors_of_a_timeline_add_up_to_what_is_alive(chain: Any, tmp_path: Path) -> None:
    symbol, _, plans, schedule = chain
    operators = [n for n in symbol.get_internals().list_outputs() if n.endswith("_output")]
    for plan in (plans[-1], schedule):
        plan.report(tmp_path / "plan.html")
        data = data_of(tmp_path / "plan.html")
        (entry,) = data["plans"]
        names, rows = data["operators"]["name"], range(len(data["operators"]["name"]))
        assert [name + "_output" for name in names] == operators
        assert data["operators"]["group"] == [re.sub("[0-9]+", "*", name) for name in names]
        assert {names[r] for r in rows if entry["times"][r] > 1} == set(plan.recomputed)
        for line in (data["unplanned"], entry["timeline"]):
            live = live_of(line)
            assert live.max() == live[line["peak"]] == line["peak_bytes"]
            assert len(live) == line["steps"] == len(line["phase"])
        assert entry["timeline"]["peak_bytes"] == plan.peak_bytes
        reasons = {t.name: t.reason for t in plan.explain().tensors if t.choice == "kept"}
        for r in rows:
            if entry["fates"][r] == "k":
                assert entry["reason"][r] == reasons[names[r]]
        assert 0 < entry["timeline"]["backward"] < entry["timeline"]["steps"]
        again = max(entry["times"])
        assert (again > 2) == (plan is schedule)
        assert again == max(t.times for t in plan.explain().tensors)


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_tensors_are_counted_as_the_command_counts_them(how: str, tmp_path: Path) -> None:
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=4, image=64, filters=16)
    plan = memonger.plan(symbol, shapes, how=how, patience=0.02)
    plan.report(tmp_path / "plan.html")
    (entry,) = data_of(tmp_path / "plan.html")["plans"]
    told = dict(line.split(None, 1) for line in str(plan.explain()).splitlines()[:3])
    sums = {choice: (nbytes, count) for choice, (nbytes, count) in entry["sums"].items()}
    assert sums == plan.explain().sums and [*told] == ["kept", "recomputed", "freed"]
    fates = "".join(entry["fates"]).replace("c", "k")
    for choice, text in told.items():
        assert text.endswith(f", {fates.count(choice[0])} tensors")
    assert ("c" in "".join(entry["fates"])) == bool(plan.copies) == (how == "marks")
    again = sum(t.nbytes for t in plan.explain().tensors if t.choice == "recomputed")
    assert sum(entry["again_bytes"]) == again


def test_merged_steps_of_a_large_network_are_exact() -> None:
    symbol, shapes = networks.lstm(2, 12, 4, 8, labels=16)
    requests = dict.fromkeys(symbol.list_arguments(), "write")
    memory = predict(Network(symbol, InputSpec(shapes, {}), requests, "any"))
    times = find_times(memory.training, TimedDevice(NOMINAL_CPU))
    operators = list_operators(memory, times)
    whole = list_alive(memory, operators, {}, 10**6)
    assert len(whole["drawn"]) == whole["steps"] > 500
    for most in (900, 600, 100):
        merged = list_alive(memory, operators, {}, most)
        assert len(merged["tensors"]["bytes"]) < most or most == 100
        assert live_of(merged).tolist() == merged["live"]
        assert merged["live"] == [whole["live"][step] for step in merged["drawn"]]
        assert merged["peak"] in merged["drawn"] and merged["peak_bytes"] == whole["peak_bytes"]
        assert max(merged["tensors"]["count"]) > 1
    assert len(merged["drawn"]) == 120


@pytest.mark.parametrize("budget", ["60%", 30_000_000])
def test_a_budget_of_the_device_leaves_out_the_optimizers_state(
    budget: Any, chain: Any, tmp_path: Path
) -> None:
    symbol, shapes, plans, _ = chain
    sizes = zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0])
    state = 8 * sum(int(np.prod(size)) for name, size in sizes if name not in shapes)
    options = {"budget": budget, "budget_of": "device", "optimizer": "adam"}
    plans.report(tmp_path / "plans.html", **options)
    data = data_of(tmp_path / "plans.html")
    whole = budget if budget != "60%" else int(0.6 * (plans[0].unplanned_device_bytes + state))
    assert data["budget"] == {"of": "device", "bytes": whole - state, "state": state, "room": 0}
    chosen = data["plans"][data["chosen"]]["figures"]["device_bytes"]
    assert chosen == next(p.device_bytes for p in plans if p.device_bytes <= whole - state)
    assert chosen < plans[0].device_bytes


OPEN = {"data": (None, 64), "label": (None, 64)}
QUICK: Any = {"how": "marks", "patience": 0.02}


def test_each_batch_in_a_page_is_planned_as_by_itself(chain: Any, tmp_path: Path) -> None:
    options = {"budget_of": "device", "optimizer": "adam", **QUICK}
    symbol, page = chain[0], tmp_path / "batch.html"
    largest = memonger.largest_batch(symbol, OPEN, "30MB", **options)
    largest.report(page, network="my-symbol.json")
    data = data_of(page)
    (chosen,), batches = data["plans"], data["batches"]
    assert chosen["figures"]["pool_bytes"] == largest.plan.pool_bytes
    assert batches[-1]["figures"] == chosen["figures"] and batches[-1]["batch"] == largest.batch
    assert batches[-1]["step_seconds"] == data["step_seconds"]
    sizes = [entry["batch"] for entry in batches]
    assert sizes == sorted(set(sizes)) and len(sizes) == 8 and largest.unplanned_batch in sizes
    of, most = data["budget"]["of"], data["budget"]["bytes"]
    without = "unplanned_bytes" if of == "pool" else "unplanned_device_bytes"
    for entry in batches:
        figures, fits = entry["figures"], entry["batch"] <= largest.unplanned_batch
        assert (figures[without] <= most) == fits == (entry["kind"] == "none")
        assert figures[f"{of}_bytes"] <= most
    entry = batches[4]
    plan = memonger.plan(
        symbol,
        dict.fromkeys(OPEN, (entry["batch"], 64)),
        budget="30MB",
        **options,
    )
    assert entry["figures"]["peak_bytes"] == plan.peak_bytes and plan.recomputed
    assert entry["figures"]["recomputed"] == len(plan.recomputed)
    assert "my-symbol.json" in entry["command"]
    assert entry["figures"]["time_overhead"] == plan.time_overhead
    plan.report(page)
    assert entry["step_seconds"] == data_of(page)["step_seconds"]


def test_the_python_and_the_command_in_a_page_make_its_plan(chain: Any, tmp_path: Path) -> None:
    symbol, shapes, plans, _ = chain
    symbol.save(str(tmp_path / "net-symbol.json"))
    smallest = memonger.plan(
        symbol, shapes, ctx=mx.cpu(), until="fc12", grad_req="add", how="marks"
    )
    module = {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}
    others = [
        memonger.plan(symbol, shapes, grad_req=module, budget="50%", patience=0.5, how="marks"),
        smallest,
    ]
    named = memonger.plan(symbol, shapes, how="schedule", keep="fc1*", recompute=["tanh3", "fc2"])
    for plan in (plans[2], named, *others):
        page = tmp_path / "plan.html"
        plan.report(page, network=str(tmp_path / "net-symbol.json"))
        (entry,) = data_of(page)["plans"]
        here: dict[str, Any] = {"memonger": memonger, "mx": mx, "net": symbol}
        exec(entry["python"], here)
        assert here["plan"].pool_bytes == plan.pool_bytes
        assert here["plan"].recomputed == plan.recomputed and here["plan"].options == plan.options
        assert bool(entry["command"]) == (plan not in others)
        if entry["command"]:
            words = shlex.split(entry["command"])
            out = tmp_path / "planned-symbol.json"
            words = [str(out) if word == out.name else word for word in words]
            assert cli.main(words[1:]) == 0
            if plan.schedule is None:
                assert memonger.pool_bytes(mx.sym.load(str(out)), shapes=shapes) == plan.pool_bytes


def train_block(net: Any) -> None:
    with mx.autograd.record():
        loss = net(mx.nd.ones((512, 64))).sum()
    loss.backward()


@pytest.mark.parametrize("way", ["by hand", "of a script"])
def test_the_python_of_a_gluon_run_plans_the_block(way: str, tmp_path: Path) -> None:
    """And its inputs are those of the block, without its parameters."""
    net, page = mx.gluon.nn.HybridSequential(prefix="mlp_"), tmp_path / "page.html"
    for _ in range(8):
        net.add(mx.gluon.nn.Dense(64, activation="tanh"))
    net.initialize()
    if way == "by hand":
        train_block(memonger.gluon.plan(net, budget="60%", patience=0.02))
        memonger.gluon.plan_of(net).report(page)
    else:
        net.hybridize()
        with memonger.enable(budget="60%", patience=0.02, cache=False, report=page):
            train_block(net)
    plan, data = memonger.gluon.plan_of(net), data_of(page)
    line = "memonger.gluon.plan(net, ctx='any', how='schedule', patience=0.02, "
    assert data["plans"][0]["python"] == f"{line}budget={plan.pool_bytes})"
    assert data["inputs"] == ["data (512, 64)"]
    exec(data["plans"][0]["python"], {"memonger": memonger, "net": net})
    train_block(net)
    again = memonger.gluon.plan_of(net)
    assert again is not plan and again.schedule is not None and plan.schedule is not None
    assert np.array_equal(again.schedule.operations, plan.schedule.operations)


def test_a_long_list_of_inputs_is_cut(tmp_path: Path) -> None:
    inputs = [mx.sym.Variable(f"x{k}") for k in range(9)]
    symbol = mx.sym.MakeLoss(mx.sym.tanh(mx.sym.add_n(*inputs)))
    frozen = {**dict.fromkeys(symbol.list_arguments(), "null"), "x0": "write"}
    for requests in ("write", frozen):
        shapes = {f"x{k}": (4, 8) for k in range(9)}
        memonger.plan(symbol, shapes, grad_req=requests).report(tmp_path / "page.html")
        first, count = (0, 7) if requests == "write" else (1, 6)
        listed = [f"x{first} (4, 8)", f"x{first + 1} (4, 8)", f"{count} more inputs"]
        assert data_of(tmp_path / "page.html")["inputs"] == listed


NASTY = "</script><img src=x onerror=alert(1)><!--'\"&\u2028слой"


def test_no_name_is_read_as_html(tmp_path: Path) -> None:
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name=NASTY)
    for k in range(6):
        x = mx.sym.Activation(x, act_type="tanh", name=f"{NASTY}{k}")
    plan = memonger.plan(mx.sym.MakeLoss(x), data=(8, 4), how="marks")
    plan.report(tmp_path / "nasty.html", network=NASTY)
    text = (tmp_path / "nasty.html").read_text(encoding="utf-8")
    assert "onerror" not in text and "<img" not in text
    data = data_of(tmp_path / "nasty.html")
    assert data["operators"]["name"][0] == NASTY and data["network"] == NASTY


def test_a_page_loads_nothing_from_elsewhere(chain: Any, tmp_path: Path) -> None:
    chain[2][-1].report(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text.split("</head>")[0]
    assert not re.findall(r"<(?:script|img|iframe|link)[^>]*\b(?:src|href)=", text)
    assert text.count("<script ") == 3 and "://" not in text and "/*-*/" not in text


def test_a_report_without_plotly_names_the_extra(
    chain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MemongerError, match=r"pip install '\.\[report\]'"):
        chain[2].report(tmp_path / "plans.html")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_kept_until_the_new_one_is_whole(
    chain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    page.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(MemongerError, match="cannot be written: disk full"):
            chain[2][-1].report(page)
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]
    with pytest.raises(MemongerError, match="there is no folder"):
        chain[2][-1].report(tmp_path / "nowhere" / "plan.html")


def test_plans_that_do_not_belong_together_are_refused(chain: Any, tmp_path: Path) -> None:
    symbol, shapes, plans, _ = chain
    other = memonger.plan(*networks.chain(4, hidden=8, batch=8), how="marks")
    half = memonger.plan(symbol, dict.fromkeys(shapes, (2048, 64)), how="marks")
    on_cpu = memonger.plan(symbol, shapes, ctx=mx.cpu(), how="marks")
    added = memonger.plan(symbol, shapes, grad_req="add", how="marks")
    for_t4 = memonger.plan(symbol, shapes, gpu="T4", how="marks")
    same = mx.sym.load_json(symbol.tojson().replace('"tanh"', '"sigmoid"'))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"others": ["plan"]}, "others: element 0 is 'plan'; give Plans"),
        ({"others": [plans[0], other]}, "others: plan 1 is for other shapes"),
        ({"others": [half]}, "others: plan 0 is for other shapes; one report"),
        ({"others": [on_cpu]}, "others: plan 0 is for another device"),
        ({"others": [added]}, "others: plan 0 is for other gradients"),
        ({"others": [for_t4]}, "others: plan 0 is for the times of another GPU"),
        (
            {"others": [memonger.plan(same, shapes, how="marks")]},
            "others: plan 0 is of another network",
        ),
        ({"others": 7}, "others=7: give Plans"),
        ({"network": 7}, "network=7: give the name of the network's file"),
        ({"budget_of": "device"}, "budget_of= and optimizer= need a budget; give budget= too"),
    ]
    for options, said in wrong:
        with pytest.raises(MemongerError, match=re.escape(said)):
            plans[-1].report(tmp_path / "plans.html", **options)
        with pytest.raises(MemongerError, match=re.split("[:=]", said)[0]):
            plans.report(tmp_path / "plans.html", **options)
    assert not list(tmp_path.iterdir())
