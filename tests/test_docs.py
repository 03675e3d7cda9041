"""README and docs: their code runs, the files that they name are there, their links lead somewhere.

The blocks of a page run one after the other in one namespace, as a reader would type them. What
the reader has is here: ``my_network()`` and ``train_iter``, small ones. What stands directly behind
a block of Python is what it prints. Of shell blocks the lines of the command ``memonger`` run; of
the others the scripts must be there.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger import cli

from planned import ROOT, run_python


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MARKS = {
    "docs/tutorial.md": pytest.mark.slow,  # it shows what a full search finds
    "docs/report.md": pytest.mark.late,
    "docs/command-line.md": pytest.mark.late,
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n((?:\n+ {4}[^\n]*)*)", re.M | re.S)
BATCH, IMAGE, CLASSES = 32, 224, 10  # the pages say (32, 3, 224, 224)


def my_network() -> Any:
    """Build ten small convolutions."""
    x = mx.sym.Variable("data")
    for i in range(10):
        x = mx.sym.Convolution(
            x, num_filter=8, kernel=(3, 3), pad=(1, 1), stride=(1, 1) if i else (4, 4)
        )
        x = mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False), act_type="relu")
    x = mx.sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
    return mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=CLASSES), name="softmax"
    )


def train_iter() -> Any:
    """Return one batch of images."""
    images = np.random.RandomState(0).uniform(-1, 1, (BATCH, 3, IMAGE, IMAGE))
    return mx.io.NDArrayIter(images.astype(np.float32), np.arange(BATCH) % CLASSES, BATCH)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES])
def test_code_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    my_network().save("net-symbol.json")
    Path("package").mkdir()
    for script in ("train.py", "package/module.py"):
        Path(script).write_text("import sys; assert sys.argv[1:]")
    here: dict[str, Any] = {"my_network": my_network, "train_iter": train_iter()}
    for fence in FENCE.finditer(page):
        line, (language, text, shown) = page[: fence.start(2)].count("\n"), fence.groups()
        capsys.readouterr()
        if language == "python":
            exec(compile("\n" * line + text, name, "exec"), here)
            if shown:
                assert capsys.readouterr().out == re.sub("^ {4}", "", shown[1:], flags=re.M) + "\n"
        else:
            assert language == "sh", f"{name}:{line}: a block in {language!r} is not run"
            for command in text.replace("\\\n", " ").splitlines():
                if command.strip().startswith("memonger run "):  # it takes its process over
                    here_too = f"import os, runpy; os.chdir({str(tmp_path)!r}); "
                    start = here_too + "runpy.run_module('memonger', run_name='__main__')"
                    ran = run_python("-c", start, *shlex.split(command)[1:])
                    assert ran.returncode == 0, ran.stderr
                elif command.strip().startswith("memonger "):
                    assert cli.main(shlex.split(command)[1:]) == 0, command


@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_is_there(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).is_file(), link
    for script, arguments in re.findall(r"((?:examples|benchmarks)/\w+\.py)([^`&|\n]*)", text):
        assert (ROOT / script).is_file(), script
        for option in re.findall(r"(--[\w-]+)", arguments):
            assert f'"{option}"' in (ROOT / script).read_text(encoding="utf-8"), option
    for test in re.findall(r"tests/[\w/]+(?:\.py)?", text):
        assert (ROOT / test).exists(), test


def test_the_readme_names_every_call_and_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [f"`{name}(" for name in memonger.__all__ if name[0].islower()]
    names += [f"memonger {verb} " for verb in cli.EXAMPLES] + [f"({name})" for name in NAMES[1:]]
    assert [name for name in names if name not in text] == []


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    names = [f"memonger.{name}" for name in memonger.__all__]
    names += [f"memonger.gluon.{name}" for name in memonger.gluon.__all__]
    assert sorted(re.findall(r"^::: (\S+)$", text, re.M)) == sorted(names)
