"""Files: what is damaged is told in one line, and what is written is whole or not there."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable, Dict

import memonger
import mxnet as mx
import pytest
from memonger.support import files
from memonger import MemongerError

import mutants
import networks
from operator_cases import CASES, DYNAMIC_CASES, planned_net, small_net

S = mx.sym

# -- good files --------------------------------------------------------------------------------


def same(symbol: Any, other: Any) -> bool:
    return bool(symbol.tojson(remove_amp_cast=False) == other.tojson(remove_amp_cast=False))


@pytest.mark.parametrize("build", [small_net, planned_net])
def test_nothing_that_mxnet_takes_is_refused(build: Callable[..., Any], tmp_path: Path) -> None:
    """Every operator case, as MXNet loads it."""
    file = str(tmp_path / "net-symbol.json")
    for name, case in {**CASES, **DYNAMIC_CASES}.items():
        build(case).save(file, remove_amp_cast=False)
        assert same(memonger.load(file), mx.sym.load(file)), name


def fused() -> Any:
    x = S.Convolution(S.Variable("data"), kernel=(3, 3), num_filter=4, name="conv")
    return S.Activation(S.BatchNorm(x, name="bn"), act_type="relu").optimize_for("MKLDNN")


def attributes() -> Any:
    x = S.Variable("naïve \t\n\"'\\", attr={"colour": "\x07é"}, shape=(2, 3))
    return S.FullyConnected(x, num_hidden=3, attr={"lr_mult": "2"}, name="\x01")


def choice() -> Any:
    a, b = S.Variable("a"), S.Variable("b")
    return S.contrib.cond(S.sum(a) > 0, lambda: S.square(a, name="\x02"), lambda: b + 1)


def counted() -> Any:
    step = (lambda i, x: i < 3, lambda i, x: ([x], [i + 1, x * 2]))
    return S.contrib.while_loop(*step, [S.Variable("i"), S.Variable("x")], max_iterations=4)[0][0]


def unrolled() -> Any:
    cell = mx.rnn.FusedRNNCell(8, 2, "lstm", bidirectional=True, get_next_state=True)
    return S.Group(cell.unroll(3, S.Variable("data"), merge_outputs=True)[1])


OTHERS = (fused, attributes, choice, counted, unrolled, lambda: S.Variable("x"))


@pytest.mark.parametrize("build", OTHERS)
@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_other_networks(build: Callable[[], Any], prefix: bytes, tmp_path: Path) -> None:
    """With subgraphs and odd names too, and with the mark that Windows puts before UTF-8."""
    file = tmp_path / "net-symbol.json"
    symbol = build()
    file.write_bytes(prefix + symbol.tojson(remove_amp_cast=False).encode())
    assert same(memonger.load(file), symbol)


def test_escapes_that_mxnet_does_not_know(tmp_path: Path) -> None:
    """As ``json.dump`` writes them."""
    file = tmp_path / "net-symbol.json"
    file.write_text(json.dumps(json.loads(attributes().tojson(), strict=False)))
    assert "\\u00ef" in file.read_text() and "\\u0007" in file.read_text()
    assert same(memonger.load(file), attributes())


#: As MXNet 0.8 wrote it: no auxiliary states, attributes of inputs on their reader.
OLD = {
    "nodes": [
        {"op": "null", "param": {}, "name": "data", "inputs": [], "backward_source_id": -1},
        {"op": "null", "param": {}, "name": "w", "inputs": [], "backward_source_id": -1},
        {"op": "null", "param": {}, "name": "gamma", "inputs": [], "backward_source_id": -1},
        {"op": "null", "param": {}, "name": "beta", "inputs": [], "backward_source_id": -1},
        {
            "op": "FullyConnected",
            "param": {"no_bias": "True", "num_hidden": "3"},
            "attr": {"weight_lr_mult": "2", "ctx_group": "a"},
            "name": "fc",
            "inputs": [[0, 0], [1, 0]],
            "backward_source_id": -1,
        },
        {
            "op": "BatchNorm",
            "param": {"eps": "0.001"},
            "name": "bn",
            "inputs": [[4, 0], [2, 0], [3, 0]],
            "backward_source_id": -1,
        },
    ],
    "arg_nodes": [0, 1, 2, 3],
    "heads": [[5, 0]],
}


def test_a_file_of_an_old_version(tmp_path: Path) -> None:
    file = tmp_path / "net-symbol.json"
    file.write_text(json.dumps(OLD))
    loaded = memonger.load(file)
    assert same(loaded, mx.sym.load(str(file)))
    assert loaded.list_auxiliary_states() == ["bn_moving_mean", "bn_moving_var"]
    assert loaded.attr_dict()["w"]["__lr_mult__"] == "2"


# -- bad files ---------------------------------------------------------------------------------


def net() -> Any:
    x = S.FullyConnected(S.Variable("data"), num_hidden=4, name="fc")
    return S.SoftmaxOutput(S.BatchNorm(x, name="bn"), name="softmax")


Change = Callable[[Dict[str, Any]], Any]

#: The nodes: data, fc_weight, fc_bias, fc, bn_gamma, beta, mean, var, bn, softmax_label, softmax.
BAD: dict[str, tuple[Change, str]] = {
    "no list": (lambda g: g.update(nodes={}), "'nodes' is an object, not a list"),
    "no heads": (lambda g: g.pop("heads"), "has no 'heads'"),
    "another field": (lambda g: g.update(layers=[]), "no field 'layers'"),
    "a node of nothing": (lambda g: g["nodes"].insert(3, None), "node 3: it is None, not an obj"),
    "no name": (lambda g: g["nodes"][3].pop("name"), "node 3: it has no 'name'"),
    "a number for a name": (lambda g: g["nodes"][3].update(name=7), "'name' is a whole number"),
    "a lone surrogate": (lambda g: g["nodes"][3].update(name="\ud800"), "is no UTF-8"),
    "a NUL": (lambda g: g["nodes"][3].update(name="a\0b"), "holds a NUL"),
    "attributes in a list": (lambda g: g["nodes"][3].update(attrs=[]), "'attrs' is a list"),
    "a number for an attribute": (
        lambda g: g["nodes"][3].update(attrs={"num_hidden": 4}),
        "node 3 ('fc'): attribute 'num_hidden' is no text: 4",
    ),
    "an attribute that MXNet cannot read": (
        lambda g: g["nodes"][3].update(attrs={"num_hidden": "x"}),
        "node 3 ('fc'): FullyConnected: Invalid Parameter format for num_hidden",
    ),
    "a missing attribute": (
        lambda g: g["nodes"][3].pop("attrs"),
        "FullyConnected: Required parameter num_hidden",
    ),
    "no operator": (lambda g: g["nodes"][3].update(op="Fc"), "has no operator 'Fc'"),
    "an operator of nobody": (
        lambda g: g["nodes"][3].update(op="Custom", attrs={"op_type": "of_nobody"}),
        "no operator 'of_nobody' is registered",
    ),
    "a pointer": (lambda g: g["nodes"][3].update(op="_Native"), "of the process that made it"),
    "a gradient": (lambda g: g["nodes"][3].update(op="_backward_BatchNorm_v1"), "is a gradient"),
    "one input less": (
        lambda g: g["nodes"][8]["inputs"].pop(),
        "node 8 ('bn'): BatchNorm takes 5 inputs, not 4",
    ),
    "no inputs": (lambda g: g["nodes"][8].update(inputs=[]), "BatchNorm takes 5 inputs, not 0"),
    "one input more": (
        lambda g: g["nodes"][10]["inputs"].append([0, 0, 0]),
        "SoftmaxOutput takes 2 inputs, not 3",
    ),
    "a state that is no variable": (
        lambda g: g["nodes"][8]["inputs"].__setitem__(4, [3, 0, 0]),
        "input 4 of BatchNorm must be a variable, not the output of 'fc' (FullyConnected)",
    ),
    "half an input": (lambda g: g["nodes"][3]["inputs"][0].clear(), "is written as [node, output]"),
    "an input that is a fraction": (
        lambda g: g["nodes"][3].update(inputs=[[0.5, 0], [1, 0], [2, 0]]),
        "is written as [node, output], not [0.5, 0]",
    ),
    "a negative input": (lambda g: g["nodes"][3].update(inputs=[[-1, 0, 0]]), "not [-1, 0, 0]"),
    "an output that is not there": (
        lambda g: g["nodes"][10].update(inputs=[[8, 3, 0], [9, 0, 0]]),
        "is output 3 of node 8 ('bn', BatchNorm), which has 3",
    ),
    "an output of a variable": (
        lambda g: g["nodes"][3].update(inputs=[[0, 1, 0], [1, 0, 0], [2, 0, 0]]),
        "is output 1 of node 0 ('data', a variable), which has 1",
    ),
    "a node that is not there": (
        lambda g: g["nodes"][3].update(inputs=[[11, 0, 0], [1, 0, 0], [2, 0, 0]]),
        "of node 11, but there are only 11 nodes",
    ),
    "a cycle": (
        lambda g: g["nodes"][3].update(inputs=[[8, 0, 0], [1, 0, 0], [2, 0, 0]]),
        "node 3 ('fc'): an input is output of node 8, which does not come before it",
    ),
    "itself": (
        lambda g: g["nodes"][3].update(control_deps=[3]),
        "a control dependency is output of node 3, which does not come before it",
    ),
    "a variable with inputs": (
        lambda g: g["nodes"][4].update(inputs=[[0, 0, 0]]),
        "node 4 ('bn_gamma'): it is a variable, and has inputs",
    ),
    "no variable": (lambda g: g["arg_nodes"].append(3), "arg_nodes names node 3"),
    "a head that is not there": (
        lambda g: g.update(heads=[[10, 1, 0]]),
        "an output of the network is output 1 of node 10 ('softmax', SoftmaxOutput), which has 1",
    ),
    "a subgraph": (
        lambda g: g["nodes"][3].update(subgraphs=[{**g, "heads": [[99, 0, 0]], "nodes": []}]),
        "node 3 ('fc'), subgraph: ",
    ),
    "no subgraph": (
        lambda g: g["nodes"][3].update(op="_foreach", attrs={"num_args": "4"}),
        "_foreach takes 1 subgraphs, not 0",
    ),
    "more inputs than can be": (
        lambda g: g["nodes"][3].update(op="Concat", attrs={"num_args": "99999999999"}),
        "Concat takes 99999999999 inputs, not 3",
    ),
    "more outputs than can be": (
        lambda g: g["nodes"][10].update(op="SliceChannel", attrs={"num_outputs": "999999999"}),
        "SliceChannel has 999999999 outputs",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file(case: str, tmp_path: Path) -> None:
    change, said = BAD[case]
    graph = json.loads(net().tojson())
    change(graph)
    file = tmp_path / "bad-symbol.json"
    file.write_bytes(json.dumps(graph).encode("utf-8", "surrogatepass"))
    with pytest.raises(MemongerError) as caught:
        memonger.load(file)
    message = str(caught.value)
    assert said in message and str(file) in message and "\n" not in message, message


TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n", "is empty"),
    "cut in a list": (b'{"nodes": [', "it ends at byte 11"),
    "cut in a text": (b'{"no', "it ends at byte 4"),
    "cut in a character": ('{"é'.encode()[:-1], "it ends at byte 3"),
    "cut in a word": (b'{"nodes": nul', "it ends at byte 13"),
    "cut in an escape": (b'{"\\u00', "it ends at byte 6"),
    "Latin-1": ('{"é": 1}'.encode("latin-1"), "byte 2 is not UTF-8 (0xe9)"),
    "no JSON": ('{"é": 1,}'.encode(), "no JSON at byte 9, line 1"),
    "two": (b"{} {}", "no JSON at byte 3"),
    "nested": (b"[" * 100000, "nested too deeply"),
    "a long number": (b"1" * 10000 + b"x", "bad-symbol.json"),
    "a list": (b"[]", "it is a list, not an object"),
    "parameters": (b"\x12\x01\x00\x00\x00\x00\x00\x00", "bad-symbol.json"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_that_is_no_network(case: str, tmp_path: Path) -> None:
    file = tmp_path / "bad-symbol.json"
    text, said = TEXTS[case]
    file.write_bytes(text)
    with pytest.raises(MemongerError) as caught:
        memonger.load(file)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_every_beginning_of_a_file_says_where_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "net-symbol.json"
    data = net().tojson().encode()
    for size in range(1, len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(MemongerError, match="it ends at byte %d" % size):
            memonger.load(file)
    file.write_bytes(data)
    memonger.load(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", str(tmp_path / "\udcff.json"), b"none", "a\0"):
        with pytest.raises(MemongerError, match="there is no file"):
            memonger.load(path)


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/\xff-symbol.json"
    files.write(file, net().tojson().encode())
    assert same(memonger.load(file), net()) and same(memonger.load(os.fsdecode(file)), net())


CRASHING = {
    "a head that is not there": lambda g: g.update(heads=[[10, 7, 0]]),
    "no inputs": lambda g: g["nodes"][8].update(inputs=[]),
    "an output that is not there": lambda g: g["nodes"][10].update(inputs=[[8, 9, 0], [9, 0, 0]]),
}


@pytest.mark.parametrize("case", CRASHING)
def test_a_symbol_that_ends_the_process(case: str) -> None:
    """MXNet loads it, and dies at the next call."""
    graph = json.loads(net().tojson())
    CRASHING[case](graph)
    symbol = mx.sym.load_json(json.dumps(graph))
    for call in (memonger.plan, memonger.get_cost, memonger.unplan):
        with pytest.raises(MemongerError, match="the network: "):
            call(symbol)


# -- many damaged files ------------------------------------------------------------------------

MUTANTS, WORKERS, MEMORY = 320, 2, 16 * 2**30
PATIENT = 300  # seconds for one, with what numba compiles


def test_damaged_files(tmp_path: Path) -> None:
    """Every verb says in one line what is wrong: no crash, no trace, no hang, no half a file."""
    context = multiprocessing.get_context("spawn")
    numbers = list(range(MUTANTS))
    wrong: list[str] = []
    statuses = []
    trying: dict[Any, tuple[Any, int]] = {}  # pipe: process, the mutant that it tries

    def start() -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        ours, theirs = context.Pipe()
        process = context.Process(target=mutants.work, args=(theirs, str(folder), MEMORY))
        process.start()
        theirs.close()
        trying[ours] = (process, -1)

    for _ in range(WORKERS):
        start()
    while trying:
        ready: list[Any] = list(wait(list(trying), timeout=PATIENT))
        if not ready:
            wrong += ["a hang: %d" % number for _, number in trying.values()]
        for pipe in ready or list(trying):
            process, number = trying.pop(pipe)
            found: Any = None
            try:
                found = pipe.recv() if ready else None
            except EOFError:
                wrong.append("a crash: %d" % number)
            if found and found.complaint:
                wrong.append(f"{found.name}: {found.complaint}")
            if found:
                statuses.append(found.status)
            if (found or number < 0) and numbers:
                trying[pipe] = (process, numbers.pop())
                pipe.send(trying[pipe][1])
                continue
            pipe.close()
            process.join(5)
            process.kill()
            if numbers:
                start()
    assert not wrong, "\n".join(wrong)
    assert len(statuses) == MUTANTS and 0.5 * MUTANTS < statuses.count(2) < 0.95 * MUTANTS


# -- what is written ---------------------------------------------------------------------------


def test_written_as_any_other_file(tmp_path: Path) -> None:
    """New ones as the umask says, old ones as they were; a link stays a link."""
    file, link = tmp_path / "a", tmp_path / "b"
    before = os.umask(0o027)
    try:
        files.write(file, b"one")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    file.chmod(0o604)
    link.symlink_to(file)
    files.write(link, b"two")
    assert link.is_symlink() and file.read_bytes() == b"two"
    assert stat.S_IMODE(file.stat().st_mode) == 0o604
    files.write("/dev/null", b"three")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


PLACES = {
    "": "it is no name of a file",
    ".": "it is a folder",
    "none/x": "there is no folder",
    "x" * 300: "File name too long",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_where_nothing_can_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (files.check_writable, lambda path: files.write(path, b"")):
        with pytest.raises(MemongerError, match=PLACES[place]):
            call(place)
    assert not list(tmp_path.iterdir())


LIMITED = """
import errno, os, resource, signal, sys
sys.path[:0] = %r
import memonger, mxnet as mx
from memonger import cli
import networks
kind = sys.argv[1]

def written(number):
    # The plan is on the disk, but not yet in its place.
    folder = os.path.dirname(os.readlink("/proc/self/fd/%%d" %% number))
    if folder == os.path.dirname(sys.argv[-1]):
        if kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

if kind == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
else:
    os.fsync = written
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("kind", ["limit", "interrupt", "full"])
def test_the_old_file_stays_whole(kind: str, tmp_path: Path) -> None:
    """With a limit, Ctrl-C or a full disk; what the search found is told all the same."""
    symbol, _ = networks.chain(16, hidden=64, batch=4096)
    source, out = tmp_path / "net-symbol.json", tmp_path / "out-symbol.json"
    symbol.save(str(source))
    out.write_text("old")
    shapes = ("--shape", "data=4096,64", "--shape", "label=4096,64", "--patience", ".01")
    code = LIMITED % [str(mutants.__file__).rsplit("/", 1)[0], networks.__file__.rsplit("/", 1)[0]]
    command = [sys.executable, "-W", "ignore", "-c", code, kind, "plan", str(source), *shapes]
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    said = {"limit": "File too large", "full": "No space left", "interrupt": "interrupted before"}
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("memonger: ") and said[kind] in line
    assert done.stdout.startswith("before") and "after" in done.stdout
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == [source, out]
