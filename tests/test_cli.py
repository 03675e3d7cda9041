"""The command ``memonger``: figures of the package, JSON, exit status, mistakes in one line."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Tuple

import memonger
import mxnet as mx
import pytest
from memonger import cli

import networks
from planned import marked

MB = 2**20
SHAPES = ("--shape", "data=4096,64", "--shape", "label=4096,64")


@pytest.fixture
def net(tmp_path: Path) -> Tuple[Any, Any, str]:
    """A network, its shapes, and the file that it is in."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    file = tmp_path / "net-symbol.json"
    symbol.save(str(file))
    return symbol, shapes, str(file)


def run(capsys: Any, *arguments: Any) -> Tuple[int, str, str]:
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return (status, *capsys.readouterr())


def test_a_planned_file_is_the_plan(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, shapes, file = net
    out, picture = tmp_path / "planned-symbol.json", tmp_path / "plan.png"
    status, printed, _ = run(capsys, "plan", file, *SHAPES, "-o", out, "--plot", picture)
    plan = memonger.plan(symbol, shapes)
    assert status == 0 and printed == str(plan) + "\n"
    assert marked(mx.sym.load(str(out))) == marked(plan.symbol)
    assert picture.read_bytes()[1:4] == b"PNG"


def test_plain_mxnet_trains_a_planned_file(net: Any, capsys: Any, tmp_path: Path) -> None:
    """A process that does not import memonger binds it, in the memory that was planned."""
    symbol, shapes, file = net
    out = tmp_path / "planned-symbol.json"
    status, printed, _ = run(capsys, "plan", file, *SHAPES, "-o", out, "--json")
    assert status == 0
    code = (
        "import sys, numpy; numpy.bool = bool\n"
        "import mxnet as mx\n"
        "net = mx.sym.load(%r)\n"
        "executor = net.simple_bind(mx.cpu(), data=(4096, 64), label=(4096, 64))\n"
        "executor.forward(is_train=True); executor.backward(); mx.nd.waitall()\n"
        "assert 'memonger' not in sys.modules\n"
        "print(executor.debug_str()[-200:])" % str(out)
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    text = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        cwd=str(tmp_path),
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
    ).stdout.decode()
    assert (
        int(re.findall(r"Total (\d+) MB allocated", text)[0])
        == json.loads(printed)["counted_bytes"] // MB
    )


def test_cost(net: Any, capsys: Any) -> None:
    symbol, shapes, file = net
    status, printed, _ = run(capsys, "cost", file, *SHAPES)
    pool = memonger.pool_bytes(symbol, shapes=shapes)
    assert status == 0 and "pool     %.1f MB" % (pool / MB) in printed
    status, printed, _ = run(capsys, "cost", file, *SHAPES, "--json")
    assert json.loads(printed) == {"pool_bytes": pool, "peak_bytes": 34 * MB, "exact": True}


def test_explain(net: Any, capsys: Any) -> None:
    symbol, shapes, file = net
    status, printed, _ = run(capsys, "explain", file, *SHAPES)
    assert status == 0 and printed == str(memonger.explain(symbol, shapes)) + "\n"
    status, printed, _ = run(capsys, "explain", file, *SHAPES, "--plan", "--json")
    found = memonger.plan(symbol, shapes).explain()
    assert [t["name"] for t in json.loads(printed)["tensors"]] == [t.name for t in found.tensors]


def test_check(net: Any, capsys: Any, tmp_path: Path) -> None:
    """Equal: 0. A network with other results: 1."""
    symbol, shapes, file = net
    planned, other = tmp_path / "planned-symbol.json", tmp_path / "other-symbol.json"
    memonger.search_plan(symbol, shapes=shapes).save(str(planned))
    graph = json.loads(symbol.tojson())
    next(n for n in graph["nodes"] if n["name"] == "tanh3")["attrs"]["act_type"] = "sigmoid"
    other.write_text(json.dumps(graph))
    small = ("--shape", "data=4,64", "--shape", "label=4,64")
    status, printed, _ = run(capsys, "check", file, planned, *small)
    assert status == 0 and printed.startswith("equal:")
    status, printed, _ = run(capsys, "check", file, other, *small, "--json")
    assert status == 1 and json.loads(printed)["equal"] is False
    assert json.loads(printed)["differences"][0]["kind"] == "output"


MISTAKES = {
    "no file": ("cost nowhere.json --shape data=1", "no file 'nowhere.json'"),
    "no network": ("cost {folder}/text.json --shape data=1", "holds no network"),
    "a missing shape": ("plan {net}", "'data'"),
    "an unknown input": ("plan {net} --shape daat=4,64", "did you mean 'data'"),
    "no shape": ("plan {net} --shape data", "written as data=32,3,224,224"),
    "no number": ("plan {net} --shape data=4,x", "whole numbers"),
    "no type": ("cost {net} --shape data=4,64 --type data", "written as data=float16"),
    "no device": ("cost {net} --shape data=4,64 --device tpu", "'tpu' is no device"),
    "no verb": ("plot {net}", "invalid choice"),
    "a schedule's file": (
        "plan {net} --shape data=4096,64 --how schedule -o {folder}/x.json",
        "cannot be saved",
    ),
    "no folder": ("plan {net} --shape data=4096,64 -o {folder}/none/x.json", "cannot be written"),
    "work of marks": ("plan {net} --shape data=4,64 --work 1.5", "how='schedule' can"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case: str, net: Any, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("text")
    command, said = MISTAKES[case]
    given = command.format(net=net[2], folder=tmp_path)
    status, printed, error = run(capsys, *shlex.split(given))
    assert status == 2 and not printed
    lines = [line for line in error.splitlines() if line.startswith("memonger")]
    assert len(lines) == 1 and said in lines[0], error
    assert "Traceback" not in error


@pytest.mark.parametrize("verb", sorted(cli.EXAMPLES))
def test_help_has_an_example(verb: str, capsys: Any) -> None:
    """And its arguments are understood."""
    status, printed, _ = run(capsys, verb, "--help")
    assert status == 0 and "example: memonger " + verb in printed
    words = shlex.split(cli.EXAMPLES[verb])
    assert words[0] == "memonger"
    assert cli._parser().parse_args(words[1:]).verb == verb


def test_the_command_line(net: Any) -> None:
    """As a process: status and one line."""
    command = [sys.executable, "-W", "ignore", "-m", "memonger.cli", "cost", net[2]]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 2 and not done.stdout
    assert "Traceback" not in done.stderr.decode()
    assert done.stderr.decode().strip().splitlines()[-1].startswith("memonger: ")
