"""Reports: what a page holds is what its Plans are; what is wrong is told; nothing is half written.

`tests/browser` looks at the pages in a browser.
"""

from __future__ import annotations

import pickle
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger import MemongerError, cli
from memonger.api import frontier
from memonger.graph.inputs import InputSpec
from memonger.solve.memory import predict
from memonger.solve.request import Request
from memonger.solve.timeline import Operators, Strings, timeline

import networks
from interrupting import press_ctrl_c
from pages import chain_plans, data_of, live_of

MB = 2**20


@pytest.fixture(scope="module")
def found() -> Any:
    """A network, its shapes, its frontier, and a schedule."""
    return chain_plans()


def test_figures_are_the_plans_own(found: Any, tmp_path: Path) -> None:
    _, _, plans, schedule = found
    page = tmp_path / "plans.html"
    plans.report(page, others=[schedule, plans[0]], budget="60%", network="my-symbol.json")
    data, shown = data_of(page), [*plans, schedule]
    assert len(data["plans"]) == len(shown) == len(plans) + 1
    for told in data["plans"]:
        figures = dict(told["figures"])
        (plan,) = (p for p in shown if p.pool_bytes == figures["pool_bytes"])
        assert told["text"] == str(plan)
        for name in ("kept", "recomputed", "copies"):
            assert figures.pop(name) == len(getattr(plan, name))
        assert figures.pop("time_overhead") == plan.predict_time()
        for name, value in figures.items():
            assert value == getattr(plan, name), name
        assert told["timeline"]["peak_bytes"] == plan.peak_bytes
        kinds = {plans[0]: "none", schedule: "schedule"}
        assert told["kind"] == kinds.get(plan, "marks")
    times = [told["figures"]["time_overhead"] for told in data["plans"]]
    assert times == sorted(times)
    limit = int(0.6 * plans[0].unplanned_bytes)
    assert data["budget"] == {"bytes": limit, "of": "pool", "state": 0}
    chosen = data["plans"][data["chosen"]]["figures"]["pool_bytes"]
    assert chosen == next(p.pool_bytes for p in plans if p.pool_bytes <= limit)


def test_the_timeline(found: Any, tmp_path: Path) -> None:
    """Tensors add up to what is alive; operators and reasons are those of the plan."""
    symbol, _, plans, schedule = found
    operators = [n for n in symbol.get_internals().list_outputs() if n.endswith("_output")]
    for plan in (plans[-1], schedule):
        plan.report(tmp_path / "plan.html")
        data = data_of(tmp_path / "plan.html")
        (told,) = data["plans"]
        names, rows = data["operators"]["name"], range(len(data["operators"]["name"]))
        assert [name + "_output" for name in names] == operators
        assert {names[r] for r in rows if told["choice"][r] == "r"} == set(plan.recomputed)
        for line in (data["unplanned"], told["timeline"]):
            live = live_of(line)
            assert live.max() == live[line["peak"]] == line["peak_bytes"]
            assert len(live) == line["steps"] == len(line["phase"])
        assert told["timeline"]["peak_bytes"] == plan.peak_bytes
        reasons = {t.name: t.reason for t in plan.explain().tensors if t.choice == "kept"}
        for r in rows:
            if told["choice"][r] == "k":
                assert data["strings"][told["reason"][r]] == reasons[names[r]]
        assert 0 < told["timeline"]["backward"] < told["timeline"]["steps"]
        again = max(told["times"] or [2])
        assert (again > 2) == (plan is schedule)
        assert again == max(t.times for t in plan.explain().tensors)


def test_what_is_merged_adds_up() -> None:
    """Of a large network fewer steps are drawn; what is drawn is exact, and the peak is there."""
    symbol, shapes = networks.lstm(2, 12, 4, 8, labels=16)
    asked = dict.fromkeys(symbol.list_arguments(), "write")
    memory = predict(Request(symbol, InputSpec(shapes, {}), asked, "any"))
    table = Operators(memory, Strings(), mx.cpu(), measure=False)
    whole = timeline(memory, table, {}, 10**6)
    assert len(whole["drawn"]) == whole["steps"] > 500
    for most in (900, 600, 100):
        merged = timeline(memory, table, {}, most)
        assert len(merged["tensors"]["bytes"]) < most or most == 100
        assert live_of(merged).tolist() == merged["live"]
        assert merged["live"] == [whole["live"][step] for step in merged["drawn"]]
        assert merged["peak"] in merged["drawn"] and merged["peak_bytes"] == whole["peak_bytes"]
        assert max(merged["tensors"]["count"]) > 1
    assert len(merged["drawn"]) == 120


@pytest.mark.parametrize("budget", ["60%", 30_000_000])
def test_a_budget_of_the_device(budget: Any, found: Any, tmp_path: Path) -> None:
    """What the optimiser takes of it is not for plans."""
    symbol, shapes, plans, _ = found
    sizes = zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0])
    state = 8 * sum(int(np.prod(size)) for name, size in sizes if name not in shapes)
    about = {"budget": budget, "budget_of": "device", "optimizer": "adam"}
    plans.report(tmp_path / "plans.html", **about)
    data = data_of(tmp_path / "plans.html")
    whole = budget if budget != "60%" else int(0.6 * (plans[0].unplanned_device_bytes + state))
    assert data["budget"] == {"of": "device", "bytes": whole - state, "state": state}
    chosen = data["plans"][data["chosen"]]["figures"]["device_bytes"]
    assert chosen == next(p.device_bytes for p in plans if p.device_bytes <= whole - state)
    assert chosen < plans[0].device_bytes


OPEN = {"data": (None, 64), "label": (None, 64)}


@pytest.mark.parametrize("about", [{}, {"budget_of": "device", "optimizer": "adam"}])
def test_batches(about: Any, found: Any, tmp_path: Path) -> None:
    """Each is planned as ``memonger.plan`` does; times are those of its own report."""
    symbol, page = found[0], tmp_path / "batch.html"
    largest = memonger.largest_batch(symbol, OPEN, "30MB", **about)
    largest.report(page, network="my-symbol.json")
    data = data_of(page)
    (chosen,), batches = data["plans"], data["batches"]
    assert chosen["figures"]["pool_bytes"] == largest.plan.pool_bytes
    assert batches[-1]["figures"] == chosen["figures"] and batches[-1]["batch"] == largest.batch
    assert batches[-1]["step_seconds"] == data["step_seconds"]
    sizes = [told["batch"] for told in batches]
    assert sizes == sorted(set(sizes)) and len(sizes) == 8 and largest.unplanned_batch in sizes
    of, most = data["budget"]["of"], data["budget"]["bytes"]
    without = "unplanned_bytes" if of == "pool" else "unplanned_device_bytes"
    for told in batches:
        figures, fits = told["figures"], told["batch"] <= largest.unplanned_batch
        assert (figures[without] <= most) == fits == (told["kind"] == "none")
        assert figures[f"{of}_bytes"] <= most
    for told in (batches[0], batches[4], batches[6]):
        shapes = dict.fromkeys(OPEN, (told["batch"], 64))
        plan = memonger.plan(symbol, shapes, budget="30MB", **about)
        assert told["text"] == str(plan) and "my-symbol.json" in told["command"]
        assert told["figures"]["time_overhead"] == plan.time_overhead
        plan.report(tmp_path / "plan.html")
        assert told["step_seconds"] == data_of(tmp_path / "plan.html")["step_seconds"]


def test_few_batches(found: Any, tmp_path: Path) -> None:
    """Where no plan helps, or nothing fits without one, or few do: no batch is told twice."""
    small = networks.chain(1, hidden=4, batch=8)[0]
    never = memonger.largest_batch(small, {"data": (None, 4)}, 3000)
    always, both = (memonger.largest_batch(found[0], OPEN, n) for n in (8000, 16_000))
    assert [each.unplanned_batch for each in (always, both)] == [0, 1]
    for largest, kinds in ((never, {"none"}), (always, {"marks"}), (both, {"none", "marks"})):
        pickle.loads(pickle.dumps(largest)).report(tmp_path / "batch.html")
        batches = data_of(tmp_path / "batch.html")["batches"]
        sizes = [told["batch"] for told in batches]
        assert sizes == sorted(set(sizes)) and sizes[-1] == largest.batch
        assert {told["kind"] for told in batches} == kinds and 2 < len(sizes) < 8


def test_a_batch_at_which_nothing_fits(
    found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is left out: a search may find less than that of a larger batch."""
    largest, solve = memonger.largest_batch(found[0], OPEN, 16_000), frontier.solve
    data = []
    for lost in (0, 2):

        def solved(request: Any, options: Any, lost: int = lost) -> Any:
            if request.spec.shapes["data"][0] == lost:
                raise memonger.BudgetError("nothing fits", 1)
            return solve(request, options)

        monkeypatch.setattr(frontier, "solve", solved)
        largest.report(tmp_path / "batch.html")
        data.append([told["batch"] for told in data_of(tmp_path / "batch.html")["batches"]])
    assert data[0].count(2) == 1 and data[1] == [n for n in data[0] if n != 2]


@pytest.mark.parametrize("share", [-1, 0.6])
def test_batches_interrupted(
    share: float, found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    largest = memonger.largest_batch(found[0], OPEN, "25MB")
    begun = press_ctrl_c(monkeypatch, share)
    with pytest.raises(KeyboardInterrupt):
        largest.report(tmp_path / "batch.html")
    assert len(begun) == 1 and not list(tmp_path.iterdir())
    with pytest.raises(MemongerError, match="network=7: give the name"):
        largest.report(tmp_path / "batch.html", network=7)  # type: ignore[arg-type]
    assert len(begun) == 1


def test_the_line_and_the_command_make_the_plan(found: Any, tmp_path: Path) -> None:
    symbol, shapes, plans, schedule = found
    symbol.save(str(tmp_path / "net-symbol.json"))
    smallest = memonger.plan(symbol, shapes, ctx=mx.cpu(), until="fc12", grad_req="add")
    module = {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}
    others = [memonger.plan(symbol, shapes, grad_req=module, budget="50%", patience=0.5), smallest]
    for plan in (plans[2], schedule, *others):
        page = tmp_path / "plan.html"
        plan.report(page, network=str(tmp_path / "net-symbol.json"))
        (told,) = data_of(page)["plans"]
        here: dict[str, Any] = {"memonger": memonger, "mx": mx, "net": symbol}
        exec(told["python"], here)
        assert here["plan"].pool_bytes == plan.pool_bytes
        assert here["plan"].recomputed == plan.recomputed and here["plan"].options == plan.options
        assert bool(told["command"]) == (plan not in others)
        if told["command"]:
            words = shlex.split(told["command"])
            out = tmp_path / "planned-symbol.json"
            words = [str(out) if word == out.name else word for word in words]
            assert cli.main(words[1:]) == 0
            if plan.schedule is None:
                assert memonger.pool_bytes(mx.sym.load(str(out)), shapes=shapes) == plan.pool_bytes


NASTY = "</script><img src=x onerror=alert(1)><!--'\"&\u2028слой"


def test_names_are_harmless(tmp_path: Path) -> None:
    """Nothing that a network or a file is called is read as HTML."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name=NASTY)
    for k in range(6):
        x = mx.sym.Activation(x, act_type="tanh", name=f"{NASTY}{k}")
    plan = memonger.plan(mx.sym.MakeLoss(x), data=(8, 4))
    plan.report(tmp_path / "nasty.html", network=NASTY)
    text = (tmp_path / "nasty.html").read_text(encoding="utf-8")
    assert "onerror" not in text and "<img" not in text
    data = data_of(tmp_path / "nasty.html")
    assert data["operators"]["name"][0] == NASTY and data["network"] == NASTY


def test_it_needs_no_network(found: Any, tmp_path: Path) -> None:
    found[2][-1].report(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text.split("</head>")[0]
    assert not re.findall(r"<(?:script|img|iframe|link)[^>]*\b(?:src|href)=", text)
    assert text.count("<script ") == 3 and "://" not in text and "/*-*/" not in text


def test_the_size_of_a_large_page(tmp_path: Path) -> None:
    """ResNet-152 with twenty plans."""
    symbol, shapes = networks.model_zoo("resnet152_v1", 8)
    plans = memonger.frontier(symbol, shapes, points=20)
    plans.report(tmp_path / "plans.html")
    assert len(plans) > 10 and (tmp_path / "plans.html").stat().st_size < 3_000_000


def test_without_plotly(found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MemongerError, match=r"pip install 'memonger\[report\]'"):
        found[2].report(tmp_path / "plans.html")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_kept_until_the_new_one_is_whole(
    found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    page.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(MemongerError, match="cannot be written: disk full"):
            found[2][-1].report(page)
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]
    with pytest.raises(MemongerError, match="there is no folder"):
        found[2][-1].report(tmp_path / "nowhere" / "plan.html")


def test_bad_input(found: Any, tmp_path: Path) -> None:
    symbol, shapes, plans, _ = found
    other = memonger.plan(*networks.chain(4, hidden=8, batch=8))
    half = memonger.plan(symbol, dict.fromkeys(shapes, (2048, 64)))
    on_cpu = memonger.plan(symbol, shapes, ctx=mx.cpu())
    added = memonger.plan(symbol, shapes, grad_req="add")
    same = mx.sym.load_json(symbol.tojson().replace('"tanh"', '"sigmoid"'))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"others": ["plan"]}, "others: element 0 is 'plan'; give Plans"),
        ({"others": [plans[0], other]}, "others: plan 1 is for other shapes"),
        ({"others": [half]}, "others: plan 0 is for other shapes; one report"),
        ({"others": [on_cpu]}, "others: plan 0 is for another device"),
        ({"others": [added]}, "others: plan 0 is for other gradients"),
        ({"others": [memonger.plan(same, shapes)]}, "others: plan 0 is of another network"),
        ({"others": 7}, "others=7: give Plans"),
        ({"budget": "lots"}, "budget='lots' cannot be read; give"),
        ({"network": 7}, "network=7: give the name of the network's file"),
        ({"budget_of": "device"}, "budget_of= and optimizer= need a budget; give budget= too"),
        ({"budget": 0.5, "budget_of": "gpu"}, "budget_of must be 'pool' or 'device', not 'gpu'"),
    ]
    for given, said in wrong:
        with pytest.raises(MemongerError, match=re.escape(said)):
            plans[-1].report(tmp_path / "plans.html", **given)
        with pytest.raises(MemongerError, match=re.split("[:=]", said)[0]):
            plans.report(tmp_path / "plans.html", **given)
    assert not list(tmp_path.iterdir())


SHAPES = ("--shape", "data=4096,64", "--shape", "label=4096,64")


def run(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return (status, *capsys.readouterr())


def test_the_command(found: Any, capsys: Any, tmp_path: Path) -> None:
    """The page has the plan that is printed, the frontier, and the original's plan."""
    symbol, shapes, _, _ = found
    file, page = tmp_path / "net-symbol.json", tmp_path / "report.html"
    graph = symbol.get_internals()["tanh7_output"]
    graph._set_attr(mirror_stage="True")
    symbol.save(str(file))
    asked = ("report", file, *SHAPES, "--points", "4", "-o", page)
    on_device = ("--budget", "20MB", "--budget-of", "device", "--optimizer", "adam")
    for more in ((), ("--budget", "60%"), on_device, ("--how", "schedule"), ("--how", "auto")):
        status, printed, error = run(capsys, *asked, *more)
        data = data_of(page)
        chosen = data["plans"][data["chosen"]]
        assert status == 0 and printed == chosen["text"] + "\n", error
        assert ("as predicted" in printed) and data["network"] == str(file)
        assert bool(data["budget"]) == ("--budget" in more)
        if more == on_device:
            limit = int(chosen["command"].split()[-3])  # in the command it is one of the pool
            assert data["budget"]["of"] == "device" and limit == chosen["figures"]["pool_bytes"]
            assert chosen["figures"]["device_bytes"] <= data["budget"]["bytes"] < 20e6
        kinds = {told["kind"] for told in data["plans"]}
        assert "original" in kinds and len(data["plans"]) > 3
        if "schedule" in more:
            assert chosen["kind"] == "schedule"
    status, printed, error = run(capsys, *asked[:-2])
    assert status == 2 and "-o" in error and not printed


def test_the_command_of_the_largest_batch(found: Any, capsys: Any, tmp_path: Path) -> None:
    file, page = tmp_path / "net-symbol.json", tmp_path / "batch.html"
    found[0].save(str(file))
    asked = ("batch", file, "--shape", "data=N,64", "--shape", "label=N,64", "--budget", "20MB")
    status, printed, error = run(capsys, *asked, "--report", page)
    assert status == 0 and printed.endswith(data_of(page)["plans"][0]["text"] + "\n"), error
    largest = memonger.largest_batch(found[0], OPEN, "20MB")
    told = data_of(page)["batches"][-1]
    assert told["batch"] == largest.batch and told["text"] == str(largest.plan)
    assert str(file) in told["command"]
    status, _, error = run(capsys, *asked, "--report", page, "-o", page)
    assert status == 2 and "--output and --report are the same file" in error


def test_the_command_checks_first(
    found: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that cannot be written, or drawn, is seen before the search is begun."""
    file = tmp_path / "net-symbol.json"
    found[0].save(str(file))
    for search in ("plan", "frontier", "largest_batch"):
        monkeypatch.setattr(memonger, search, None)
    batch = ("batch", file, *SHAPES, "--budget", "20MB", "--report")
    asked = ("report", file, *SHAPES, "-o"), batch
    for words in asked:
        status, _, error = run(capsys, *words, tmp_path / "no" / "r.html")
        assert status == 2 and "there is no folder" in error
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for words in asked:
        status, _, error = run(capsys, *words, tmp_path / "r.html")
        assert status == 2 and "memonger[report]" in error and len(error.splitlines()) == 1
