"""Ctrl-C at the command line, at any moment: one line and status 2, or what the search found."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import memonger
import pytest

import networks

pytestmark = pytest.mark.python_differs

PROJECT = Path(memonger.__file__).resolve().parents[1]
NOTHING = "memonger: interrupted before anything was found"
SHAPES = ("--shape", "data=4096,64", "--shape", "label=4096,64")


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """Not what pytest was started with: a shell has its background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def started(*command: str, path: Path) -> "subprocess.Popen[str]":
    """A process that looks at ``path`` first for what it imports."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(path), str(PROJECT)]))
    command = (sys.executable, "-W", "ignore", *command)
    pipe: Any = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def script() -> Tuple[str, ...]:
    """What the installed script does."""
    found = re.search(r"memonger=([\w.]+):(\w+)", (PROJECT / "setup.py").read_text())
    assert found is not None
    return ("-c", "import sys; from %s import %s as f; sys.exit(f())" % found.groups())


CTRL_C = """
import os, signal
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
"""
LOST = "try: ctrl_c()\nexcept BaseException: pass"
NOT_THERE = "\nraise ModuleNotFoundError('none', name='mxnet')"
MOMENTS = {
    "before main": ("argparse", "ctrl_c()", NOTHING),
    "while a verb imports": ("mxnet", "ctrl_c()", NOTHING),
    "in code that exec runs": ("mxnet", "exec('ctrl_c()')", NOTHING),
    "where it would be lost": ("mxnet", LOST + NOT_THERE, NOTHING),
    "at exit": ("mxnet", "import atexit; atexit.register(ctrl_c)" + NOT_THERE, "not installed"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", ["-m memonger", "script"])
def test_one_line_and_status_2(how: str, moment: str, tmp_path: Path) -> None:
    module, content, said = MOMENTS[moment]
    (tmp_path / (module + ".py")).write_text(CTRL_C + content)
    command = script() if how == "script" else how.split()
    done = started(*command, "cost", str(PROJECT / "setup.py"), path=tmp_path)
    printed, error = done.communicate(timeout=60)
    assert done.returncode == 2 and not printed
    assert len(error.splitlines()) == 1 and said in error, error


def after(seconds: float, folder: Path) -> Tuple[float, int, str, List[str]]:
    """Plan, and press Ctrl-C so long after Python has reached the command."""
    given = ("plan", str(folder / "net-symbol.json"), *SHAPES, "--patience", "1000")
    running = started("-X", "importtime", "-m", "memonger", *given, path=folder)
    assert running.stderr is not None and running.stdout is not None
    for line in running.stderr:
        if line.rstrip().endswith(" memonger.command"):
            break
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    error = running.stderr.read().splitlines()
    printed = running.stdout.read()
    said = [x for x in error if not re.match("import time:|memonger: compiling the search", x)]
    return seconds, running.wait(60), printed, said


def test_at_many_moments(tmp_path: Path) -> None:
    networks.chain(16, hidden=64, batch=4096)[0].save(str(tmp_path / "net-symbol.json"))
    moments = (0.01, 0.1, 0.2, 0.4, 0.7, 1.0, 1.6, 4.0)
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda seconds: after(seconds, tmp_path), moments))
    for _, status, printed, said in ended:
        if status == 0:  # the search had found something
            assert printed.startswith("before") and len(said) == 1, ended
            assert said[0].startswith("memonger: interrupted: this is the best plan"), ended
        else:
            assert (status, printed, said) == (2, "", [NOTHING]), ended
