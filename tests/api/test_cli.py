"""The command ``memonger``: figures, JSON, exit status, mistakes in one line, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import pytest
from memonger import cli
from memonger.support.numpy1 import IS_NUMPY_2

import networks
from interrupting import press_ctrl_c
from pages import data_of
from planned import ROOT, marked, python_path, run_python, start_python

pytestmark = [pytest.mark.python_differs, pytest.mark.one_plan]

MB = 2**20
NOTHING = "memonger: interrupted before anything was found"
SHAPES = ("--shape", "data=4096,64", "--shape", "label=4096,64")


@pytest.fixture
def net(tmp_path: Path) -> tuple[Any, Any, str]:
    """Return a network, its shapes, and the file that it is in."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    file = tmp_path / "net-symbol.json"
    symbol.save(str(file))
    return symbol, shapes, str(file)


def run(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return (status, *capsys.readouterr())


def figures(capsys: Any, *arguments: Any) -> Any:
    status, printed, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(printed)


NET = "{net} --shape data=4096,64"
MOMENTUM = ("sgd", {"momentum": 0.9})
#: What is written, the function that is called, and with which options.
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    (f"plan {NET} --budget 60%", "plan", {"budget": "60%"}),
    (f"plan {NET} --budget 0.6 --how auto", "plan", {"budget": 0.6, "how": "auto"}),
    (f"plan {NET} --budget 25165824", "plan", {"budget": 24 * MB}),
    (
        "batch {net} --shape data=N,64 --budget 9MB -o {folder}/x",
        "largest_batch",
        {"budget": "9MB", "how": "marks"},
    ),
    (f"plan {NET} --how schedule --work 3", "plan", {"how": "schedule", "work": 3.0}),
    (
        f"plan {NET} --budget 24MiB --budget-of device --optimizer sgd,momentum=0.9",
        "plan",
        {"budget": "24MiB", "budget_of": "device", "optimizer": MOMENTUM},
    ),
    (f"plan {NET} --slower-than 1.1 --budget knee", "plan", {"slower_than": 1.1, "budget": "knee"}),
    (
        f"plan {NET} --keep 'a*' --keep ::dot --recompute b",
        "plan",
        {"keep": ["a*", "::dot"], "recompute": ["b"]},
    ),
    (f"plan {NET} --ctx cpu --devices 2", "plan", {"ctx": "cpu", "devices": 2}),
    (f"plan {NET} --type data=float16", "plan", {"type_dict": {"data": "float16"}}),
    (f"frontier {NET} --patience 0.5 --measure", "frontier", {"patience": 0.5, "measure": True}),
    (f"plan {NET} --gpu T4 --budget 60%", "plan", {"gpu": "T4", "budget": "60%"}),
    (
        "batch {net} --shape data=N,64 --gpu 'RTX 3090' --budget 9MB",
        "largest_batch",
        {"gpu": "RTX 3090", "budget": "9MB"},
    ),
    (f"frontier {NET} --points 5 --how schedule", "frontier", {"points": 5, "how": "schedule"}),
    (f"explain {NET} --devices 2", "explain", {"devices": 2}),
    (f"explain {NET} --plan --budget 60%", "plan", {"budget": "60%"}),
    (f"check {{net}} {NET} --steps 2", "check", {"steps": 2}),
    ("batch {net} --shape data=N,64 --budget 10MB", "largest_batch", {"budget": "10MB"}),
    (f"report {NET} --points 4 --work 2 --budget 9MB -o {{folder}}/x", "frontier", {"points": 4}),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[0])
def test_what_is_written_are_the_arguments_of_the_call(
    case: Any, net: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BudgetError is status 1, and one line."""
    command, name, options = case
    options_of_call: dict[str, Any] = {}

    def call(*networks: Any, **options: Any) -> None:
        assert all(isinstance(network, mx.sym.Symbol) for network in networks)
        options_of_call.update(options)
        raise memonger.BudgetError("nothing fits", 1)

    monkeypatch.setattr(memonger, name, call)
    words = shlex.split(command.format(net=net[2], folder=tmp_path))
    assert run(capsys, *words) == (1, "", "memonger: nothing fits\n")
    shape = (None, 64) if "N" in command else (4096, 64)
    if "ctx" in options_of_call:
        options_of_call["ctx"] = str(options_of_call["ctx"]).split("(")[0]
    assert options_of_call == {"shapes": {"data": shape}, **options}


#: A command, and what the API returns, which is printed.
PRINTED: dict[str, Callable[..., Any]] = {
    "plan": memonger.plan,
    "frontier --points 5": lambda *net: memonger.frontier(*net, points=5),
    "explain": memonger.explain,
    "explain --details": lambda *net: memonger.explain(*net).details(),
    "explain --plan --details": lambda *net: memonger.plan(*net).explain().details(),
}


@pytest.mark.parametrize("command", PRINTED)
def test_a_verb_prints_and_draws_what_its_call_returns(
    command: str, net: Any, capsys: Any, tmp_path: Path
) -> None:
    (verb, *options), picture = command.split(), tmp_path / "picture.png"
    options += [] if verb == "explain" else ["--plot", str(picture)]
    status, printed, _ = run(capsys, verb, net[2], *SHAPES, *options)
    assert status == 0 and printed == f"{PRINTED[command](*net[:2])}\n"
    assert verb == "explain" or picture.read_bytes()[1:4] == b"PNG"


def test_json_has_the_figures_of_the_call(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, shapes, file = net
    plan, out = memonger.plan(symbol, shapes, how="marks"), tmp_path / "planned-symbol.json"
    values = figures(capsys, "plan", file, *SHAPES, "-o", out)
    assert marked(mx.sym.load(str(out))) == marked(plan.symbol)
    for name in ("pool_bytes", "unplanned_bytes", "time_overhead", "recompute_overhead"):
        assert values[name] == getattr(plan, name)
    tensors = figures(capsys, "explain", file, *SHAPES, "--plan", "--how", "marks")["tensors"]
    assert [t["name"] for t in tensors] == [t.name for t in plan.explain().tensors]
    plans = figures(capsys, "frontier", file, *SHAPES, "--points", "5")
    expected = memonger.frontier(symbol, shapes, points=5)
    assert [p["pool_bytes"] for p in plans] == [p.pool_bytes for p in expected]
    values = figures(capsys, "explain", file, *SHAPES)
    assert values["pool_bytes"] == memonger.pool_bytes(symbol, shapes=shapes)
    assert values["peak_bytes"] == 34 * MB and not values["inexact"]


def test_a_schedule_is_told_and_not_saved(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, shapes, file = net
    out, arguments = tmp_path / "planned-symbol.json", ("plan", file, *SHAPES, "--budget", "60%")
    values, plan = figures(capsys, *arguments), memonger.plan(symbol, shapes, budget="60%")
    assert values["pool_bytes"] == plan.pool_bytes and values["schedule"]
    for how in ("auto", "schedule"):
        status, _, error = run(capsys, *arguments, "--how", how, "-o", out)
        assert status == 2 and "cannot be saved" in error and not out.exists()


OPEN = ("--shape", "data=N,64", "--shape", "label=N,64")


def test_batch_tells_and_writes_the_largest(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, _, file = net
    out, page = tmp_path / "planned-symbol.json", tmp_path / "batch.html"
    arguments = ("batch", file, *OPEN, "--budget", "10MB")
    values = figures(capsys, *arguments, "-o", out)
    largest = memonger.largest_batch(symbol, dict.fromkeys(net[1], (None, 64)), "10MB", how="marks")
    assert values["batch"] == largest.batch and [*values][1:] == ["plan", "unplanned_batch"]
    assert values["unplanned_batch"] == largest.unplanned_batch
    assert marked(mx.sym.load(str(out))) == marked(largest.plan.symbol)
    status, printed, _ = run(capsys, *arguments, "--how", "marks", "--report", page)
    fits = f"a batch of {largest.batch} fits with a plan, of {largest.unplanned_batch} without"
    assert status == 0 and printed.startswith(fits)
    shown, last = data_of(page)["plans"][0]["text"], printed.splitlines()[-1]
    assert printed.endswith(f"{shown}\n{last}\n")
    shapes = " ".join(OPEN).replace("N", str(largest.batch))
    assert last == f"next       memonger plan {file} {shapes} --budget 10MB --how marks"
    assert data_of(page)["batches"][-1]["batch"] == largest.batch


def test_the_next_command_is_one_that_can_be_run(capsys: Any, tmp_path: Path) -> None:
    """Flags may be cut short, and an input may be named N."""
    file = str(tmp_path / "net-symbol.json")
    mx.sym.LinearRegressionOutput(mx.sym.sin(mx.sym.var("N")), mx.sym.var("y")).save(file)
    words = f"{file} --sha=N=N,8 --shape y=N,8 --budget 1MB --rep={tmp_path}/a.html".split()
    status, printed, error = run(capsys, "batch", *words)
    last = printed.splitlines()[-1]
    batch = re.match("a batch of ([0-9]+) fits", printed)
    assert status == 0 and batch, error
    shapes = f"--sha=N={batch[1]},8 --shape y={batch[1]},8"
    assert last == f"next       memonger plan {file} {shapes} --budget 1MB"
    assert run(capsys, *shlex.split(last)[2:])[0] == 0


def test_a_shell_completes_options(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line, out = "memonger plan net.json --bud", tmp_path / "words"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked.update(_ARGCOMPLETE_STDOUT_FILENAME=str(out), _ARGCOMPLETE_IFS="\n")
    root = str(Path(memonger.__file__).parents[1])
    environment = {**os.environ, **asked, "PYTHONPATH": root}
    subprocess.run([sys.executable, "-m", "memonger"], env=environment, check=True)
    assert out.read_text().split() == ["--budget", "--budget-of"]


def test_batch_tells_what_its_budget_bounds(net: Any, capsys: Any) -> None:
    """The pool; and how to bound a card, where the device takes more. Or a card."""
    _, printed, _ = run(capsys, "batch", net[2], *OPEN, "--budget", "10MB", "--patience", "0.02")
    first, second, *_ = printed.splitlines()
    assert first.endswith(" without, into 9.5 MiB of MXNet's pool")
    card = "for a card of that size: --ctx gpu --gpu T4 --optimizer sgd,momentum=0.9 (in Python: "
    assert second.startswith("card       ")
    assert f" of the device are taken, more than 9.5 MiB; {card}" in second
    of_card = ("--budget", "2GB", "--ctx", "gpu", "--gpu", "T4", "--patience", "0.02")
    _, printed, _ = run(capsys, "batch", net[2], *OPEN, *of_card)
    first, second, *_, last = printed.splitlines()
    assert ", into 1907.3 MiB of the whole device; 1024.0 MiB of a GPU are left to CUDA" in first
    assert not second.startswith("card")
    assert last.endswith(" --ctx gpu --gpu T4 --patience 0.02 --budget-of device")


ON_DEVICE = ("--budget", "20MB", "--budget-of", "device", "--optimizer", "adam")


@pytest.mark.parametrize("more", [("--budget", "60%"), ON_DEVICE, ("--how", "schedule")])
def test_report_writes_the_plan_that_is_printed_beside_others(
    more: Any, net: Any, capsys: Any, tmp_path: Path
) -> None:
    """The frontier, and where there are marks the original's plan."""
    file, page = tmp_path / "marked-symbol.json", tmp_path / "report.html"
    net[0].get_internals()["tanh7_output"]._set_attr(mirror_stage="True")
    net[0].save(str(file))
    arguments = ("report", file, *SHAPES, "--points", "4", "-o", page)
    status, printed, error = run(capsys, *arguments, *more)
    data = data_of(page)
    chosen = data["plans"][data["chosen"]]
    assert status == 0 and printed == chosen["text"] + "\n", error
    assert "as predicted" in printed and data["network"] == str(file)
    assert bool(data["budget"]) == ("--budget" in more)
    if more == ON_DEVICE:
        words = chosen["command"].split()
        limit = int(
            words[words.index("--budget") + 1].rstrip("B")
        )  # in the command it is one of the pool
        assert data["budget"]["of"] == "device" and limit == chosen["figures"]["pool_bytes"]
        assert chosen["figures"]["device_bytes"] <= data["budget"]["bytes"] < 20e6
    assert "original" in {plan["kind"] for plan in data["plans"]} and len(data["plans"]) > 3
    assert chosen["kind"] == "schedule" or "schedule" not in more


def test_check_tells_equal_networks_from_others(net: Any, capsys: Any, tmp_path: Path) -> None:
    """Equal: 0. A network with other results: 1."""
    symbol, shapes, file = net
    planned, other = tmp_path / "planned-symbol.json", tmp_path / "other-symbol.json"
    memonger.search_plan(symbol, shapes=shapes).save(str(planned))
    other.write_text(symbol.tojson().replace('"tanh"', '"sigmoid"', 1))
    small = ("--shape", "data=4,64", "--shape", "label=4,64")
    status, printed, _ = run(capsys, "check", file, planned, *small)
    assert status == 0 and printed.startswith("equal:")
    status, printed, _ = run(capsys, "check", file, other, *small, "--json")
    assert status == 1 and json.loads(printed)["equal"] is False
    assert json.loads(printed)["differences"][0]["kind"] == "output"


MISTAKES = [
    ("explain nowhere.json --shape data=1", "no file 'nowhere.json'"),
    ("plan {net} --shape data", "written as data=32,3,224,224"),
    ("plan {net} --shape data=4,x", "whole numbers"),
    ("plan {net} --shape data=N,64", "shape (None, 64) holds None; every size"),
    *(
        (words, f"memonger {words.split()[0]}: unrecognized arguments: {said}; see memonger ")
        for words, said in (
            ("plan {net} --bugdet 60%", "--bugdet (did you mean --budget?)"),
            ("report {net} --bugdet=60%", "--bugdet (did you mean --budget?)"),
            ("batch {net} --shape data=N,64 --bugdet 1GB", "--bugdet (did you mean --budget?)"),
            ("explain {net} --plan --bugdet 60%", "--bugdet (did you mean --budget?)"),
            ("run --bugdet 60% x.py", "--bugdet (did you mean --budget?)"),
            ("frontier {net} --bugdet 60%", "--bugdet"),
            ("frontier {net} --ponits 3", "--ponits (did you mean --points?)"),
            ("check {net} --budget 60%", "--budget"),
            ("check {net} {net} --setps 3", "--setps (did you mean --steps?)"),
        )
    ),
    ("--vresion", "memonger: unrecognized arguments: --vresion (did you mean --version?); see"),
    ("plan {net} --budget 6gallons", "budget='6gallons': unknown unit 'gallons'; use kB, MB"),
    ("plan {folder}", "is a folder; give the *-symbol.json in it"),
    ("plan /dev/null", "'/dev/null' is not an ordinary file; give a *-symbol.json"),
    ("batch {net} --shape data=N,N --budget 1GB", "has None twice; None is the batch; give all"),
    ("explain {net} --shape data=²,64", "whole numbers"),
    (f"explain {{net}} --shape data={'9' * 5000},64", "whole numbers"),
    ("explain {net} --shape data=4,64 --shape data=4,64", "data is given twice"),
    ("explain {net} --shape data=4,64 --type data", "written as data=float16"),
    ("explain {net} --type data=float16 --type data=int8", "data is given twice"),
    ("explain {net} --shape data=4,64 --ctx tpu", "ctx must be a device such as"),
    ("explain {net} --ctx gpu(99999999999)", "not 'gpu(99999999999)'"),
    ("explain {net} --shape data=99999999999,64", "2**31 - 1 elements"),
    ("plot {net}", "invalid choice"),
    ("plan {net} --shape data=4096,64 --how schedule -o {folder}/x.json", "cannot be saved"),
    ("explain {net} --shape data=4,64 --budget-of device", "--budget-of is for a plan; give"),
    ("explain {net} --shape data=4,64 --measure", "--measure is for a plan"),
    ("batch {net} --shape data=N,64", "--budget"),
    ("batch {net} --budget 9MB", "--shape data=N,"),
    ("plan {net}", "inputs are needed: 'data'; give them as data=(...)"),
    ("plan {net}", "(in a shell: --shape data=...)"),
    ("plan {net} --shape data=4,64 --budget 60", "60 needs a unit: 60MB, 60B, or 60%"),
    ("run --budget 6000 train.py", "6000 needs a unit: 6000MB"),
    ("report {net} --shape data=4,64", "-o"),
    ("plan {net} --budget 60% --optimizer sgd,momentum", "written as sgd,momentum=0.9"),
    ("plan {net} --shape data=4,64 --shape label=5,64", "do not fit"),
]

#: What is seen before the search is begun.
PLACES = [
    ("plan {net} --shape data=4096,64 -o {folder}/none/x.json", "there is no folder"),
    ("batch {net} --shape data=N,64 --budget 1MB -o .", "it is a folder"),
    ("plan {net} -o {net}", "--output is the network itself"),
    ("plan {net} -o {net}", "give another file; memonger.unplan takes a plan out of a network"),
    ("batch {net} --budget 1MB --report {net}", "--report is the network itself"),
    ("plan {net} --shape data=4,64 --plot {folder}/x.xyz", "must end in .png"),
    ("frontier {net} --shape data=4,64 --plot ''", "must end in .png"),
    ("plan {net} -o {folder}/x.png --plot {folder}/../{name}/x.png", "are the same file"),
    ("batch {net} --budget 1MB -o x.html --report x.html", "--output and --report are the same"),
    ("report {net} -o {folder}/no/r.html", "there is no folder"),
    ("batch {net} --budget 20MB --report {folder}/no/r.html", "there is no folder"),
]
#: And where there is no plotly.
PAGES = [
    ("report {net} -o {folder}/r.html", "pip install '.[report]'"),
    ("batch {net} --budget 20MB --report {folder}/r.html", "pip install '.[report]'"),
]


@pytest.mark.parametrize(
    ("command", "said"), [*MISTAKES, *PLACES, *PAGES], ids=lambda text: text[:70]
)
def test_a_mistake_is_one_line(
    command: str, said: str, net: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if (command, said) not in MISTAKES:
        for search in ("plan", "frontier", "largest_batch"):
            monkeypatch.setattr(memonger, search, None)
    if (command, said) in PAGES:
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
    line_of_shell = command.format(net=net[2], folder=tmp_path, name=tmp_path.name)
    status, printed, error = run(capsys, *shlex.split(line_of_shell))
    assert status == 2 and not printed
    lines = [line for line in error.splitlines() if line.startswith("memonger")]
    assert len(lines) == 1 and said in lines[0], error
    assert "Traceback" not in error


def test_ctrl_c_after_the_search_leaves_what_it_found(
    net: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it found is told and written."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "planned-symbol.json"
    monkeypatch.setattr(memonger, "check", interrupted)
    status, printed, error = run(capsys, "plan", net[2], *SHAPES, "-o", out, "--check")
    said = f"memonger: interrupted before the plan was checked; it is written to {str(out)!r}\n"
    assert status == 130 and printed.startswith("before") and error.endswith(said)
    assert marked(mx.sym.load(str(out)))


#: A verb, in which search Ctrl-C is pressed when a share of it is done, and what is said.
STOPS = [
    ("frontier {net} --points 4", 1, "interrupted; the best that was found is printed"),
    ("explain {net} --plan", 1, "interrupted; the best that was found is printed"),
    ("report {net} --points 4 -o {page}", 1, "interrupted before {page!r} was written"),
]


@pytest.mark.parametrize(("command", "search", "said"), STOPS)
def test_after_ctrl_c_the_status_is_130_and_a_line_says_what_was_written(
    command: str,
    search: int,
    said: str,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A page is not written by halves: the search for its other plans is not begun."""
    page, file = str(tmp_path / "page.html"), str(tmp_path / "net-symbol.json")
    symbol, _ = networks.chain(17, hidden=64, batch=4096)  # for which no other test has plans
    symbol.save(file)
    begun = press_ctrl_c(monkeypatch, 0.3, search)
    words = command.format(net=file, page=page).split()
    status, _, error = run(capsys, *words, *SHAPES, "--how", "marks")
    assert status == 130 and error.endswith(f"memonger: {said.format(page=page)}\n")
    assert len(begun) == search and not Path(page).exists()


def test_a_second_ctrl_c_ends_the_command_at_once() -> None:
    """Also where the first is caught, and within a call of a library."""
    twice = "from memonger.__main__ import interrupt\nimport os, signal, time\n"
    twice += "signal.signal(signal.SIGINT, interrupt)\ntry: signal.raise_signal(signal.SIGINT)\n"
    twice += (
        "except KeyboardInterrupt:\n    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
    )
    twice += "    except KeyboardInterrupt: os._exit(7)"
    assert ended("-c", twice, path=Path())[0] == -signal.SIGINT


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_plan_checks_the_share_of_one_device_and_tells_a_difference_by_its_status(
    how: str, net: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        "plan",
        net[2],
        "--shape",
        "data=64,64",
        "--shape",
        "label=64,64",
        "--devices",
        "2",
    )
    status, printed, _ = run(capsys, *arguments, "--how", how, "--check")
    assert status == 0 and re.search(r"^check      equal: \d+ arrays in 3 steps", printed, re.M)
    report = memonger.CheckReport(1, 1, (), ("softmax_output",), True)
    checked_shapes = {}

    def check(net: Any, planned: Any, shapes: Any, **options: Any) -> memonger.CheckReport:
        checked_shapes.update(shapes)
        return report

    monkeypatch.setattr(memonger, "check", check)
    status, printed, _ = run(capsys, *arguments, "--how", how, "--check", "--json")
    assert status == 1 and json.loads(printed)["check"]["not_finite"] == ["softmax_output"]
    assert checked_shapes == {"data": (32, 64), "label": (32, 64)}


def test_small_networks_are_told_in_kib(capsys: Any, tmp_path: Path) -> None:
    """Without operators, and with sizes below one MiB."""
    file = str(tmp_path / "net-symbol.json")
    mx.sym.Variable("x").save(file)
    status, printed, _ = run(capsys, "explain", file, "--shape", "x=2,3")
    assert status == 0 and printed.startswith("the network has no operators")
    networks.chain(2, hidden=8, batch=4)[0].save(file)
    pool = memonger.pool_bytes(mx.sym.load(file), data=(4, 8), label=(4, 8))
    for verb in ("explain", "plan"):
        status, printed, _ = run(capsys, verb, file, "--shape", "data=4,8")
        assert status == 0 and f"{pool / 1024:.1f} KiB" in printed and " MiB" not in printed


def test_what_a_custom_operator_says_is_in_the_message(capsys: Any) -> None:
    """In the message, not on stdout; and without a trace."""

    @mx.operator.register("tests_bad_shape")
    class Bad(mx.operator.CustomOpProp):  # type: ignore[misc, name-defined, unused-ignore]
        def infer_shape(self, in_shape: Any) -> Any:
            raise ValueError(f"two inputs are wanted, \\1 not {len(in_shape)}")

    bad = mx.sym.Custom(mx.sym.Variable("data"), op_type="tests_bad_shape", name="mine")
    with pytest.raises(memonger.MemongerError) as caught:
        memonger.plan(mx.sym.MakeLoss(bad), data=(2, 3), how="marks")
    message = str(caught.value)
    assert message.endswith("ValueError: two inputs are wanted, \\1 not 1") and "'mine'" in message
    assert "Traceback" not in message and not capsys.readouterr().out


def started(*command: str, path: Path) -> subprocess.Popen[str]:
    """Return a process that finds stand-ins for what it imports at ``path``."""
    imports = os.pathsep.join([str(path), str(ROOT)])
    return start_python("-W", "ignore", *command, PYTHONPATH=imports)


def ended(*command: str, path: Path) -> tuple[int, str, str]:
    """Return its status, what it printed, and what it said."""
    with started(*command, path=path) as process:
        printed, error = process.communicate(timeout=120)
    return process.returncode, printed, error


PLAIN = """
import sys, numpy
numpy.bool, sys.modules["memonger"] = bool, None  # nothing can import it
import mxnet as mx

net, ones = mx.sym.load(%r), numpy.ones((4096, 64), "float32")
mod = mx.mod.Module(net, label_names=["label"])
mod.fit(mx.io.NDArrayIter(ones, ones, 4096, label_name="label"), num_epoch=1, eval_metric="mse")
executor = net.simple_bind(mx.cpu(), data=(4096, 64), label=(4096, 64))
print(executor.debug_str()[-200:])
"""


@pytest.mark.skipif(IS_NUMPY_2, reason="MXNet alone cannot be imported")
def test_plain_mxnet_trains_a_planned_file(net: Any, capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "planned-symbol.json"
    values = figures(capsys, "plan", net[2], *SHAPES, "-o", out)
    _, trained, _ = ended("-c", PLAIN % str(out), path=tmp_path)
    (total,) = re.findall(r"Total (\d+) MB allocated", trained)
    assert int(total) == values["counted_bytes"] // MB


LIGHT = """
import sys
from memonger import cli
try:
    cli.main(sys.argv[1:])
finally:
    heavy = {"mxnet", "numpy", "tqdm", "matplotlib"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("plan", "--help"), ()])
def test_help_imports_nothing_heavy_and_needs_no_mxnet(arguments: Any, tmp_path: Path) -> None:
    (tmp_path / "mxnet.py").write_text("raise ImportError('not here')")
    status, _, error = ended("-c", LIGHT, *arguments, path=tmp_path)
    assert status == (0 if arguments else 2), error
    verbs = "memonger: a verb is needed: run, plan, frontier, report, batch, explain, check; see"
    assert arguments or error.startswith(verbs)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("batch", "shape of an input, the batch, which is to be found, as N"),
        ("plan", "shape of an input, the batch first"),
        ("plan", "FILE write the planned network"),
        ("plan", "FILE draw memory over the step"),
        ("plan", "schedule where possible, marks with --output"),
        ("plan", "or the whole device (default with --optimizer)"),
        ("report", "FILE write the page"),
        ("report", "marks: at most once; auto (default): schedule where possible"),
        ("frontier", "FILE draw memory against time"),
        ("batch", "6GB, 6GiB, bytes, or device: what is free on the GPU"),
        ("batch", "or the whole device (default on a GPU, and with --optimizer)"),
        ("batch", "FILE write a page of the plan, and of samples a second against batch"),
        ("check", "DEVICE where both train: cpu (default), gpu or gpu(1)"),
        ("run", "FILE write a page of the largest network at the end"),
        ("run", "train each network and its plan for three steps first, and compare them"),
        ("run", "or the whole device (default on a GPU, and with --optimizer)"),
        ("run", "where it is not the script's own: adam, or sgd,momentum=0.9"),
    ],
)
def test_help_of_a_verb_speaks_of_that_verb(capsys: Any, verb: str, said: str) -> None:
    _, printed, _ = run(capsys, verb, "--help")
    assert f"{said} --" in " ".join(printed.split())


@pytest.mark.parametrize("verb", [*cli.VERBS, "run"])
def test_help_of_a_verb_names_what_that_verb_has_alone(capsys: Any, verb: str) -> None:
    """No other verb, and no option that it lacks."""
    _, printed, _ = run(capsys, verb, "--help")
    usage, _, rest = printed.partition("\n\n")
    told = " ".join(rest.partition("example:")[0].split())
    flags = {*re.findall(r"--[a-z-]+", usage), "--help", "--output"}
    assert {*re.findall(r"--[a-z-]+", told)} <= flags
    for other in {*cli.VERBS, "run"} - {verb}:
        assert not re.search(rf"\b(of|and|memonger) {other}\b", told)


def test_a_terminal_shows_that_mxnet_is_imported(net: Any) -> None:
    """From the start, for it takes seconds; a line that is cleared, and none in a file."""
    command = ["-W", "ignore", "-m", "memonger", "explain", net[2], *SHAPES]
    terminal, stderr = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    os.close(stderr)
    said, shown = b"memonger: importing MXNet\r", b""
    while len(shown) < len(said):
        shown += os.read(terminal, 100)
    assert shown == said and running.poll() is None
    printed, _ = running.communicate(timeout=100)
    cleared = os.read(terminal, 1000)
    os.close(terminal)
    assert cleared == b" " * 25 + b"\r" and printed.startswith(b"pool ")
    assert run_python(*command).stderr == ""


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    x = mx.sym.FullyConnected(mx.sym.Variable("данные"), num_hidden=3)
    file = str(tmp_path / "сеть-symbol.json")
    mx.sym.MakeLoss(x, name="слой").save(file)
    command = ("-W", "ignore", "-m", "memonger", "explain", file, "--shape", "данные=4,4")
    done = run_python(*command, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "\\u0441\\u043b" in done.stdout, done.stderr


@pytest.mark.parametrize("verb", sorted(cli.EXAMPLES))
def test_help_has_an_example_that_is_understood(verb: str, capsys: Any) -> None:
    status, printed, _ = run(capsys, verb, "--help")
    assert status == 0 and cli.EXAMPLES[verb] in printed
    words = shlex.split(cli.EXAMPLES[verb])
    assert words[0] == "memonger"
    status, printed, error = run(capsys, *words[1:])
    assert status == 2 and "there is no file" in error and not printed


def test_a_reader_who_has_seen_enough(net: Any) -> None:
    """As with ``| head -1``: no traceback."""
    running = started("-m", "memonger", "explain", net[2], *SHAPES, path=Path())
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    error = running.stderr.read()
    assert running.wait(120) == 0 and "Traceback" not in error and "BrokenPipe" not in error


CTRL_C = """
import os, signal
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
"""
LOST = "try: ctrl_c()\nexcept BaseException: pass"
NOT_THERE = "\nraise ModuleNotFoundError('none', name='mxnet')"
#: A module, what stands in for it, and what is said.
STAND_INS = {
    "no MXNet": ("mxnet", NOT_THERE, "is not installed"),
    "an old NumPy": ("numpy", "__version__ = '1.16.6'", "1.16.6 is installed; pip install -U"),
    "Ctrl-C before main": ("argparse", "ctrl_c()", NOTHING),
    "Ctrl-C while a verb imports": ("mxnet", "ctrl_c()", NOTHING),
    "Ctrl-C in code that exec runs": ("mxnet", "exec('ctrl_c()')", NOTHING),
    "Ctrl-C where it would be lost": ("mxnet", LOST + NOT_THERE, NOTHING),
    "Ctrl-C at exit": ("mxnet", "import atexit; atexit.register(ctrl_c)" + NOT_THERE, "installed"),
}
#: What the installed script does.
MODULE, NAME = re.findall(r'memonger = "([\w.]+):(\w+)"', (ROOT / "pyproject.toml").read_text())[0]
SCRIPT = ("-c", f"import sys; from {MODULE} import {NAME} as f; sys.exit(f())")


@pytest.mark.parametrize(
    ("command", "case"),
    [*((("-m", "memonger"), case) for case in STAND_INS), (SCRIPT, "Ctrl-C before main")],
)
def test_one_line_and_the_status(command: Any, case: str, net: Any, tmp_path: Path) -> None:
    module, content, said = STAND_INS[case]
    (tmp_path / (module + ".py")).write_text(CTRL_C + content)
    status, printed, error = ended(*command, "explain", net[2], *SHAPES, path=tmp_path)
    assert status == (130 if said == NOTHING else 2) and not printed
    assert len(error.splitlines()) == 1 and said in error, error


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (1, "interrupted before the networks were compared"),
        (2, "interrupted before the networks were compared"),
        (
            3,
            "interrupted before the original was run again, to see whether it repeats itself; "
            r"3 of 3 arrays differ, first output 'last_output' in step 0 \(by [\d.]+\)",
        ),
    ],
)
def test_an_interrupted_check_says_what_was_found(
    training: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    files = []
    for act in ("tanh", "sigmoid"):
        x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
        files.append(str(tmp_path / f"{act}-symbol.json"))
        mx.sym.Activation(x, act_type=act, name="last").save(files[-1])
    begun: list[int] = []

    def seed(_: int) -> None:
        begun.append(0)
        if len(begun) == training:
            raise KeyboardInterrupt

    monkeypatch.setattr(mx.random, "seed", seed)
    assert cli.main(["check", *files, "--shape", "data=2,3", "--steps", "1"]) == 130
    assert re.fullmatch(f"memonger: {said}\n", capsys.readouterr().err)
