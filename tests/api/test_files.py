"""Files of networks: damage is told in one line; what is written is whole or nothing."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Callable, Dict

import memonger
import mxnet as mx
import pytest
from memonger.support import files
from memonger import MemongerError, cli

import networks
from interrupting import press_ctrl_c
from operator_cases import CASES, DYNAMIC_CASES, planned_net, small_net
from planned import marked

S = mx.sym


def same(symbol: Any, other: Any) -> bool:
    return bool(symbol.tojson(remove_amp_cast=False) == other.tojson(remove_amp_cast=False))


@pytest.mark.parametrize("build", [small_net, planned_net])
def test_nothing_that_mxnet_takes_is_refused(build: Callable[..., Any], tmp_path: Path) -> None:
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


WRITTEN: tuple[Callable[[str], bytes], ...] = (
    str.encode,
    lambda text: b"\xef\xbb\xbf" + text.encode(),  # as Windows marks UTF-8
    lambda text: json.dumps(json.loads(text, strict=False)).encode(),  # escapes MXNet knows not
)


@pytest.mark.parametrize("build", OTHERS)
@pytest.mark.parametrize("written", WRITTEN, ids=["plain", "marked", "escaped"])
def test_odd_networks_are_loaded_as_they_were_written(
    build: Any, written: Callable[[str], bytes], tmp_path: Path
) -> None:
    """With subgraphs and odd names too."""
    file, symbol = tmp_path / "net-symbol.json", build()
    file.write_bytes(written(symbol.tojson(remove_amp_cast=False)))
    assert same(memonger.load(file), symbol)


def old(op: str, name: str, *inputs: int, **more: Any) -> dict[str, Any]:
    links = [[i, 0] for i in inputs]
    node = {"op": op, "param": {}, "name": name, "inputs": links, "backward_source_id": -1}
    return {**node, **more}


#: As MXNet 0.8 wrote it: no auxiliary states, attributes of inputs on their reader.
FC = {
    "param": {"no_bias": "True", "num_hidden": "3"},
    "attr": {"weight_lr_mult": "2", "ctx_group": "a"},
}
OLD = {
    "nodes": [
        *[old("null", name) for name in ("data", "w", "gamma", "beta")],
        old("FullyConnected", "fc", 0, 1, **FC),
        old("BatchNorm", "bn", 4, 2, 3, param={"eps": "0.001"}),
    ],
    "arg_nodes": [0, 1, 2, 3],
    "heads": [[5, 0]],
}


def test_a_file_of_an_old_version_is_loaded_as_by_mxnet(tmp_path: Path) -> None:
    file = tmp_path / "net-symbol.json"
    file.write_text(json.dumps(OLD))
    loaded = memonger.load(file)
    assert same(loaded, mx.sym.load(str(file)))
    assert loaded.list_auxiliary_states() == ["bn_moving_mean", "bn_moving_var"]
    assert loaded.attr_dict()["w"]["__lr_mult__"] == "2"


def net() -> Any:
    x = S.FullyConnected(S.Variable("data"), num_hidden=4, name="fc")
    return S.SoftmaxOutput(S.BatchNorm(x, name="bn"), name="softmax")


Graph = Dict[str, Any]
Change = Callable[[Graph], Any]


def of(node: int, **changes: Any) -> Change:
    return lambda g: g["nodes"][node].update(changes)


def reading(node: int, *inputs: list[Any]) -> Change:
    return of(node, inputs=[[*entry, 0] if len(entry) == 2 else entry for entry in inputs])


FC_INPUTS = [1, 0], [2, 0]
#: The nodes: data, fc_weight, fc_bias, fc, bn_gamma, beta, mean, var, bn, softmax_label, softmax.
BAD: list[tuple[Change, str]] = [
    (lambda g: g.update(nodes={}), "node 10, but only 0 nodes come before"),
    (lambda g: g.pop("heads"), "this is not MXNet's format (KeyError('heads'))"),
    (lambda g: g.update(layers=[]), "Unknown field layers"),
    (lambda g: g["nodes"].insert(3, None), "node 3: this is not MXNet's format"),
    (lambda g: g["nodes"][3].pop("name"), "node 3: this is not MXNet's format (KeyError('name'"),
    (of(3, name=7), "but get '7'"),
    (of(3, name="\ud800"), "can't encode character '\\ud800'"),
    (of(3, name="a\0b"), "reach end of line"),
    (of(3, attrs=[]), "node 3 ('fc'): this is not MXNet's format"),
    (of(3, attrs={"num_hidden": 4}), "FullyConnected: attribute 'num_hidden' must be a string"),
    (of(3, attrs={"num_hidden": "x"}), "('fc'): FullyConnected: Invalid Parameter format for num_"),
    (lambda g: g["nodes"][3].pop("attrs"), "FullyConnected: Required parameter num_hidden"),
    (of(3, op="Fc"), "node 3 ('fc'): Fc: MXNet has no operator of this name"),
    (of(3, op="Custom", attrs={"op_type": "of_nobody"}), "no operator 'of_nobody' is registered"),
    (of(3, op="_Native"), "points into the process that made it"),
    (of(3, op="_backward_BatchNorm_v1"), "is a gradient"),
    (lambda g: g["nodes"][8]["inputs"].pop(), "node 8 ('bn'): BatchNorm takes 5 inputs, not 4"),
    (of(8, inputs=[]), "BatchNorm takes 5 inputs, not 0"),
    (reading(10, [8, 0], [9, 0], [0, 0]), "SoftmaxOutput takes 2 inputs, not 3"),
    (
        reading(8, [3, 0], [4, 0], [5, 0], [6, 0], [3, 0]),
        "input 4 of BatchNorm must be a variable, not the output of 'fc' (FullyConnected)",
    ),
    (lambda g: g["nodes"][3]["inputs"][0].clear(), "must be [node, output]"),
    (of(3, inputs=[[0.5, 0], [1, 0], [2, 0]]), "must be [node, output], not [0.5, 0]"),
    (of(3, inputs=[[-1, 0, 0]]), "not [-1, 0, 0]"),
    (reading(10, [8, 3], [9, 0]), "is output 3 of node 8 ('bn', BatchNorm), which has only 3"),
    (reading(3, [0, 1], *FC_INPUTS), "is output 1 of node 0 ('data', null), which has only 1"),
    (reading(3, [11, 0], *FC_INPUTS), "of node 11, but only 3 nodes come before"),
    (reading(3, [8, 0], *FC_INPUTS), "node 3 ('fc'): an input is an output of node 8, but"),
    (
        of(3, control_deps=[3]),
        "a control dependency is an output of node 3, but only 3 nodes come before",
    ),
    (reading(4, [0, 0]), "node 4 ('bn_gamma'): it is a variable, but has inputs"),
    (lambda g: g["arg_nodes"].append(3), "arg_nodes has node 3"),
    (
        lambda g: g.update(heads=[[10, 1, 0]]),
        "an output of the network is output 1 of node 10 ('softmax', SoftmaxOutput), which has o",
    ),
    (
        lambda g: g["nodes"][3].update(subgraphs=[{**g, "heads": [[99, 0, 0]], "nodes": []}]),
        "node 3 ('fc'): subgraph: ",
    ),
    (of(3, op="_foreach", attrs={"num_args": "4"}), "_foreach takes 1 subgraphs, not 0"),
    (of(3, op="Concat", attrs={"num_args": "99999999999"}), "takes 99999999999 inputs, not 3"),
    (of(10, op="SliceChannel", attrs={"num_outputs": "999999999"}), "has 999999999 outputs"),
]


def changed(change: Change) -> str:
    graph = json.loads(net().tojson())
    change(graph)
    return json.dumps(graph)


#: MXNet loads these, and crashes at the next call.
CRASHING = (lambda g: g.update(heads=[[10, 7, 0]]), of(8, inputs=[]), reading(10, [8, 9], [9, 0]))


@pytest.mark.parametrize("change", CRASHING)
def test_a_symbol_that_would_end_the_process_is_refused(change: Change) -> None:
    symbol = mx.sym.load_json(changed(change))
    for call in (memonger.plan, memonger.get_cost, memonger.unplan):
        with pytest.raises(MemongerError, match="the network: "):
            call(symbol)


TEXTS: list[tuple[bytes, str]] = [
    (b" \n", "it ends at byte 2"), ('{"é'.encode()[:-1], "it ends at byte 3"),
    (b'{"nodes": nul', "it ends at byte 13"), (b'{"\\u00', "it ends at byte 6"),
    ('{"é": 1}'.encode("latin-1"), "can't decode byte 0xe9 in position 2"),
    ('{"é": 1;}'.encode(), "line 1 column 8"), (b"{} {}", "Extra data: line 1 column 4"),
    (b"[" * 100000, "not a network"), (b"1" * 10000 + b"x", "bad-symbol.json"),
    (b"[]", "this is not MXNet's format"),
    (b"\x12\x01\x00\x00\x00\x00\x00\x00", "bad-symbol.json"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), [*BAD, *TEXTS])
def test_a_bad_file_is_refused_in_one_line(content: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "bad-symbol.json"
    if not isinstance(content, bytes):
        content = changed(content).encode("utf-8", "surrogatepass")
    file.write_bytes(content)
    with pytest.raises(MemongerError) as caught:
        memonger.load(file)
    message = str(caught.value)
    assert said in message and str(file) in message and "\n" not in message, message


def test_a_file_that_was_cut_off_is_refused_with_where_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "net-symbol.json"
    data = net().tojson().encode()
    for size in [*range(1, len(data), 7), len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(MemongerError, match=f"it ends at byte {size}"):
            memonger.load(file)
    file.write_bytes(data)
    memonger.load(file)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    parameters, onnx = tmp_path / "net-0000.params", tmp_path / "net.onnx"
    mx.nd.save(str(parameters), {"arg:weight": mx.nd.ones(3)})
    onnx.write_bytes(b"\x08\x07")
    with pytest.raises(
        MemongerError, match=r"holds arrays, not a network; give the \*-symbol.json"
    ):
        memonger.load(parameters)
    with pytest.raises(
        MemongerError, match=r"is a network of ONNX; convert it by mx\.contrib\.onnx"
    ):
        memonger.load(onnx)


def test_a_path_may_be_any_that_the_system_takes(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", str(tmp_path / "\udcff.json"), b"none", "a\0"):
        with pytest.raises(MemongerError, match="there is no file|is a folder"):
            memonger.load(path)
    file = os.fsencode(tmp_path) + b"/\xff-symbol.json"  # not UTF-8
    files.write(file, net().tojson().encode())
    assert same(memonger.load(file), net()) and same(memonger.load(os.fsdecode(file)), net())


def test_files_are_written_with_the_modes_of_any_other(tmp_path: Path) -> None:
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
    "": "it is not a file name",
    ".": "it is a folder",
    "none/x": "there is no folder",
    "x" * 300: "its name is longer than 255 bytes",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_where_nothing_can_be_written_is_told(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (files.check_writable, lambda path: files.write(path, b"")):
        with pytest.raises(MemongerError, match=PLACES[place]):
            call(place)
    assert not list(tmp_path.iterdir())


#: What fails in the midst of it, by which error; the status, and what is said.
FAILING: list[tuple[str, Any, int, str]] = [
    ("os.fsync", OSError(errno.ENOSPC, "No space left"), 2, "No space left"),
    ("os.fsync", KeyboardInterrupt(), 130, "interrupted before all was written"),
    (
        "search",
        KeyboardInterrupt(),
        130,
        "memonger: interrupted; the best that was found is written",
    ),
]


@pytest.mark.parametrize(("place", "error", "status", "said"), FAILING)
def test_the_old_file_stays_whole(
    place: str,
    error: Any,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a full disk and after Ctrl-C; what the search found is told all the same."""

    def fail(*_: Any) -> None:
        raise error

    source, out = tmp_path / "net-symbol.json", tmp_path / "out-symbol.json"
    networks.chain(16, hidden=64, batch=4096)[0].save(str(source))
    out.write_text("old")
    if place == "search":
        press_ctrl_c(monkeypatch, 0.3)
    else:
        monkeypatch.setattr(place, fail)
    assert cli.main(["plan", str(source), "--shape", "data=4096,64", "-o", str(out)]) == status
    printed, log = capsys.readouterr()
    assert said in log + caplog.text and "Traceback" not in log
    assert printed.startswith("before") and "after" in printed
    assert sorted(tmp_path.iterdir()) == [source, out]
    assert marked(memonger.load(out)) if place == "search" else out.read_text() == "old"
