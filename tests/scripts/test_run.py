"""``memonger run``: a script runs as under Python, and what it trains is planned."""

from __future__ import annotations

import os
import py_compile
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pages import data_of
from planned import ROOT, python_path, run_python


def ended(
    *arguments: Any, folder: Path, typed: str = "a line\n", **environment: str
) -> tuple[int, str, str]:
    done = run_python("-W", "ignore", *arguments, typed=typed, folder=folder, **environment)
    return done.returncode, done.stdout, done.stderr


#: What a script sees of its process; it imports no MXNet.
SEES = """
import sys
if __name__ == "__main__":
    loader = getattr(__loader__, "__name__", type(__loader__).__name__)
    print(sorted(globals()), type(__builtins__), loader, globals().get("__annotations__"))
    print(sys.argv, __file__, __name__, __spec__ and __spec__.name, __package__)
    print(globals().get("__cached__"))  # until Python 3.15
    __builtins__.one_more = "a builtin"

import atexit, inspect, multiprocessing, pickle, threading, time

class Thing:
    pass

def is_thing(thing):
    return type(thing).__name__, type(thing).__module__ in ("__main__", "__mp_main__")

if __name__ == "__main__":
    print([sys.path[0]], sys.stdin.read(), sys.modules["__main__"].Thing is Thing, one_more)
    print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
    print("mxnet" in sys.modules, inspect.stack()[0].function)
    atexit.register(print, "at the end")
    if "spawn" in sys.argv:
        print(inspect.getsource(Thing))
        for way in ("fork", "spawn"):
            with multiprocessing.get_context(way).Pool(1) as pool:
                print(way, pool.apply(is_thing, (Thing(),)))
    threading.Thread(target=lambda: (time.sleep(0.2), print("the thread"))).start()
    sys.exit(7)
"""


@pytest.mark.parametrize(
    "script",
    [
        ["scripts/sees.py", "spawn"],
        ["./scripts/../scripts/sees.py"],
        ["scripts/sees.pyc"],
        ["-m", "scripts.sees", "spawn"],
        ["-m", "scripts"],
        ["scripts"],
        ["scripts.zip"],
        ["-"],
    ],
    ids=str,
)
def test_a_script_runs_as_under_python(script: list[str], tmp_path: Path) -> None:
    """A file, a module, a folder, a zip file, standard input."""
    package = tmp_path / "scripts"
    package.mkdir()
    for name in ("sees.py", "__main__.py"):
        (package / name).write_text(SEES)
    py_compile.compile(str(package / "sees.py"), str(package / "sees.pyc"))
    shutil.make_archive(str(package), "zip", package)
    options, typed = ["--its", "own", "--report", "--", "-m", "x"], "a line\n"
    if script == ["-"]:
        typed = SEES
    expected = ended(*script, *options, folder=tmp_path, typed=typed)
    assert expected[0] == 7 and expected[1].endswith("\nthe thread\nat the end\n")
    run = ["-m", "memonger", "run", "--work", "2"]
    assert ended(*run, *script, *options, folder=tmp_path, typed=typed) == expected


def test_the_command_is_of_this_package_whatever_the_path_says(tmp_path: Path) -> None:
    """The script gets its own memonger.py, and what it trains is planned by this package."""
    (entry,) = re.findall(r'^memonger = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "memonger"
    command.write_text("import sys\nfrom {} import {} as run\nsys.exit(run())\n".format(*entry))
    (tmp_path / "memonger.py").write_text("import mxnet\nmine = 1\n")
    (tmp_path / "train.py").write_text(
        "import memonger\nprint(memonger.__file__, memonger.mine)\n"
        "import mxnet as mx\nfrom modules import SHAPES, net\n"
        "net().simple_bind(mx.cpu(), **SHAPES)\nimport memonger\nprint(memonger.mine)\n"
    )
    path = os.pathsep.join([".", python_path()])
    run = [command, "run", "--no-cache", "train.py"]
    status, printed, log = ended(*run, folder=tmp_path, PYTHONPATH=path)
    assert (status, printed) == (0, f"{tmp_path / 'memonger.py'} 1\n1\n"), log
    assert log.startswith(
        "memonger: softmax on cpu(0): 1.6 MiB, as it is: less than 64.0 MiB, left"
    )


NAMES = """
import mxnet as mx
from memonger.scripts.plan_cache import file_of
from memonger.solve.limits import Limits
from memonger.solve.network import read_unplanned

network = mx.sym.MakeLoss(mx.sym.Variable("x") * 2)
print(file_of(read_unplanned(network, {"x": (2,)}), Limits()))
"""


@pytest.mark.slow
def test_a_kept_plan_is_of_the_code_that_made_it(tmp_path: Path) -> None:
    package = shutil.copytree(ROOT / "memonger", tmp_path / "memonger")
    names = []
    for change in ("", "", "# Changed."):
        with open(package / "api" / "plan.py", "a", encoding="utf-8") as file:
            file.write(change)
        (tmp_path / "names.py").write_text(NAMES)
        names.append(ended("names.py", folder=tmp_path)[1])
    assert names[0] == names[1] != names[2] and names[0].endswith(".json\n")


FAILS = """
import os, signal, sys
if sys.argv[1] == "interrupted":
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
if sys.argv[1] == "hooked":
    def show(kind, error, traceback):
        print(kind, error, traceback.tb_frame.f_code.co_name, error.__traceback__ is traceback)
    sys.excepthook = show
raise KeyError("what fails")
"""


@pytest.mark.parametrize(
    "script",
    [
        ["fails.py", "by itself"],
        ["fails.py", "hooked"],
        ["fails.py", "interrupted"],
        ["-m", "fails", "by itself"],
        ["wrong.py"],
        ["empty"],
        ["-m", "none.such"],
    ],
    ids=str,
)
def test_a_script_that_fails_ends_as_under_python(script: list[str], tmp_path: Path) -> None:
    """With the same traceback, of its own frames alone, which its own hook gets too."""
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "wrong.py").write_text("x = = 1\n")
    (tmp_path / "empty").mkdir()
    expected = ended(*script, folder=tmp_path)
    assert expected[0] == (-signal.SIGINT if "interrupted" in script else 1) and any(expected[1:])
    assert ended("-m", "memonger", "run", *script, folder=tmp_path) == expected


SHOWS = """
import inspect, logging, sys, traceback
import mxnet as mx

class Net(mx.gluon.nn.HybridBlock):
    def hybrid_forward(self, F, x):
        print([(*entry[:3],) for entry in traceback.extract_stack()])
        print(traceback.StackSummary.extract(traceback.walk_stack(None))[0].name)
        print(*[entry.name for entry in traceback.extract_stack(limit=2)])
        print(*[(entry.function, entry.lineno, entry.filename) for entry in inspect.stack()])
        raise KeyError("in the network")

def call():
    with mx.autograd.record():
        net(x)

net = Net()
net.hybridize()
x = mx.nd.ones((2, 3))
x.attach_grad()
try:
    call()
except KeyError as error:
    logging.exception("logged", stack_info=True)
    traceback.print_exc()
    print(*[frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)])
    raise ValueError("of it") from error
"""


@pytest.mark.parametrize("script", [["shows.py"], ["-m", "shows"]], ids=str)
def test_call_stacks_are_those_of_the_script(script: list[str], tmp_path: Path) -> None:
    """Printed, logged, and of the exception that ends it, with the one that it came from."""
    (tmp_path / "shows.py").write_text(SHOWS)
    expected = ended(*script, folder=tmp_path)
    assert expected[0] == 1 and expected[2].count("hybrid_forward\n") == 3
    status, printed, log = ended("-m", "memonger", "run", *script, folder=tmp_path)
    log, said = re.subn(r"memonger: nothing was planned: .*\n", "", log)
    assert (status, printed, log, said) == (*expected, 1)


OWN = """
import traceback
import memonger, mxnet as mx

try:
    memonger.plan(mx.sym.var("x") * 2, {"y": (2,)})
except memonger.MemongerError:
    traceback.print_exc()
    raise
"""


def test_a_call_stack_of_an_error_of_this_package_is_whole(tmp_path: Path) -> None:
    """As the script prints it, and as it ends the script."""
    (tmp_path / "own.py").write_text(OWN)
    expected = ended("own.py", folder=tmp_path)
    assert expected[0] == 1 and expected[2].count(str(ROOT / "memonger")) > 2
    status, printed, log = ended("-m", "memonger", "run", "own.py", folder=tmp_path)
    log, said = re.subn(r"memonger: nothing was planned: .*\n", "", log)
    assert (status, printed, log, said) == (*expected, 1)


TRAINS = """
import os, sys
import memonger  # without it MXNet cannot be imported on NumPy 2
import mxnet as mx
import efforts
from modules import BATCH, IMAGES, LABELS, LEARNING, net, parameters

efforts.use(efforts.SHORT)
mx.random.seed(0)
batches = mx.io.NDArrayIter(IMAGES[:64], LABELS[:64], BATCH)
module = mx.mod.Module(net())
about = {"arg_params": parameters(net()), "optimizer_params": LEARNING}
module.fit(batches, num_epoch=1, batch_end_callback=lambda _: mx.nd.waitall(), **about)
module.save_checkpoint(sys.argv[1], 1, save_optimizer_states=True)
"""


def test_what_a_script_trains_is_planned(tmp_path: Path) -> None:
    """Its files are byte for byte the same; options come as variables too; a report is written."""
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    options = {"MEMONGER_HOW": "schedule", "MEMONGER_PATIENCE": "0.01"}
    run = ["-m", "memonger", "run", "--report", "page.html", "--work", "3"]
    plain = ended(script, "plain", folder=tmp_path)
    planned = ended(*run, script, "planned", folder=tmp_path, **options)
    assert plain[0] == planned[0] == 0 and planned[1] == plain[1] == ""
    first, last = [line for line in planned[2].splitlines() if line.startswith("memonger: ")]
    assert "softmax on cpu(0), data (32, 3, 8, 8), softmax_label (32,): 1.6 MiB -> " in first
    assert "planned in" in first and last.startswith("memonger: 1 planned, the largest 1.6 MiB -> ")
    for file in ("symbol.json", "0001.params", "0001.states"):
        names = (tmp_path / f"{which}-{file}" for which in ("plain", "planned"))
        assert len({name.read_bytes() for name in names}) == 1
    data = data_of(tmp_path / "page.html")
    command = data["plans"][0]["command"]
    assert data["network"] == "softmax" and command.startswith("memonger run ")
    assert command.endswith(f" --report page.html --work 3 {script} planned")
    assert " --how=schedule " in command and " --patience=0.01 " in command


def test_the_end_tells_what_was_planned_of_all(tmp_path: Path) -> None:
    """With sums; and why nothing was, where nothing was: with a budget, as a warning."""
    (tmp_path / "none.py").write_text("import mxnet\n")
    (tmp_path / "two.py").write_text(
        "import mxnet as mx\nfrom modules import SHAPES, net\n"
        "bound = [net().simple_bind(mx.cpu(), **SHAPES)]\n"
        "bound += [mx.sym.sin(mx.sym.var('x')).simple_bind(mx.cpu(), x=(2, 3))]\n"
    )
    run = ["-m", "memonger", "run", "--no-cache", "--patience", "0.01"]
    why = "that is done for what this process binds for gradients, and for hybridized blocks"
    *_, log = ended(*run, "none.py", folder=tmp_path)
    assert log.startswith(f"memonger: nothing was planned: {why} that it records (call")
    *_, log = ended(*run, "--budget", "1GB", "none.py", folder=tmp_path)
    said = f"memonger: nothing was planned, so the budget of 1GB does not hold: {why}"
    assert log.startswith(said)
    *_, log = ended(*run, "--how", "schedule", "two.py", folder=tmp_path)
    last = log.splitlines()[-1]
    assert re.match(
        r"memonger: 1 of 2 planned, 1\.6 MiB -> \S+ MiB in all; the largest 1\.6 ", last
    )
    assert last.count(" MiB") == 4 and "KiB" not in last
    many = "import mxnet as mx\nfor n in range(2, 10):\n    x = mx.sym.sin(mx.sym.var('x'))\n"
    (tmp_path / "many.py").write_text(many + "    x.simple_bind(mx.cpu(), x=(1024 * n, 256))\n")
    *_, told = ended(*run, "many.py", folder=tmp_path)
    lines = told.splitlines()
    assert [" on cpu(0)" in line for line in lines] == 5 * [True] + 2 * [False]
    assert lines[5] == "memonger: more networks are planned; the end tells of all"
    assert lines[6].startswith(
        "memonger: 0 of 8 planned, 88.0 MiB -> 88.0 MiB in all; the largest 18"
    )


BAR = """
import mxnet as mx
from tqdm import tqdm
from modules import SHAPES, net

for _ in tqdm(range(2), mininterval=0):
    net().simple_bind(mx.cpu(), **SHAPES)
"""


def test_a_line_does_not_stick_to_a_progress_bar(tmp_path: Path) -> None:
    """A carriage return, spaces over the bar and another one go before it."""
    (tmp_path / "bar.py").write_text(BAR)
    run = ["-m", "memonger", "run", "--no-cache", "bar.py"]
    *_, log = ended(*run, folder=tmp_path)
    lines = [line for line in log.splitlines() if "memonger: " in line]
    left = "1.6 MiB, as it is: less than 64.0 MiB, left alone without a budget, how= or names"
    assert [re.sub(r"\d+\.\d s", "T", line) for line in lines] == [
        f"memonger: softmax on cpu(0): {left}; planned in T",
        f"memonger: 0 planned, the largest {left}; T to plan",
    ]
    assert re.search(r"0/2 .*\n +\nmemonger: ", log)


ENDS = """
import os, shutil, sys
import mxnet as mx
import efforts
from modules import SHAPES, net

efforts.use(efforts.SHORT)
net().simple_bind(mx.cpu(), **SHAPES)
os.mkdir("scratch")
os.chdir("scratch")
if sys.argv[1:]:
    shutil.rmtree(os.path.join("..", sys.argv[1]))
if os.fork() == 0:
    sys.exit(3)
assert os.WEXITSTATUS(os.wait()[1]) == 3
sys.exit(5)
"""


@pytest.mark.slow
def test_the_end_is_told_once_and_the_status_is_the_scripts(tmp_path: Path) -> None:
    """Once by the process that began; the report is where the command was started, or not."""
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "pages").mkdir()
    run = ["-m", "memonger", "run", "--no-cache", "--patience", "0.01", "--report"]
    status, _, log = ended(*run, "page.html", "ends.py", folder=tmp_path)
    assert status == 5 and log.count("0 planned, the largest") == 1
    assert [*tmp_path.rglob("*.html")] == [tmp_path / "page.html"]
    (tmp_path / "scratch").rmdir()
    status, _, log = ended(*run, "pages/page.html", "ends.py", "pages", folder=tmp_path)
    assert status == 5 and log.count("0 planned, the largest") == 1
    last = log.splitlines()[-1]
    assert re.match("memonger: the report is not written: .* there is no folder", last)


@pytest.mark.slow
def test_a_plan_is_checked_by_this_package(tmp_path: Path) -> None:
    """Though the script has a memonger.py of its own, in the folder where it is started."""
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "memonger.py").write_text("search_plan = None\n")
    command = tmp_path / "bin" / "memonger"
    command.parent.mkdir()
    command.write_text("from memonger.__main__ import run\nrun()\n")
    run = [command, "run", "--no-cache", "--patience", "0.01", "--check", "ends.py"]
    log = ended(*run, folder=tmp_path, PYTHONPATH=python_path())[2]
    assert "softmax, checked: equal: " in log


INTERRUPTED = """
import os, signal, threading
import mxnet as mx
from modules import SHAPES, net

threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
net().simple_bind(mx.cpu(), **SHAPES)
print("bound")
"""


def test_ctrl_c_while_a_network_is_planned(tmp_path: Path) -> None:
    """It is the script's, though the search has a plan by then."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    run = ["-m", "memonger", "run", "--no-cache", "--how", "schedule", "--patience", "1000"]
    status, printed, log = ended(*run, script, folder=tmp_path)
    assert status == -signal.SIGINT and printed == "" and log.endswith("KeyboardInterrupt\n")


def test_a_budget_that_nothing_meets_ends_the_script_in_one_line(tmp_path: Path) -> None:
    """The script ends with the numbers in one line."""
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    run = ["-m", "memonger", "run", "--budget", "1%", "--patience", "0.01"]
    status, _, log = ended(*run, script, "planned", folder=tmp_path)
    assert status == 1 and "Traceback" not in log
    assert re.search(r"[\w)]; --or-plain trains it without a plan$", log.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "6 gallons", "script.py"], "budget='6 gallons': unknown unit"),
        (["--work", "0.5", "script.py"], "work=0.5 is less than one forward pass"),
        (["--report", "no/folder/page.html", "script.py"], "there is no folder"),
        (
            ["--hew", "marks", "script.py"],
            r"unrecognized arguments: --hew \(did you mean --how\?\)",
        ),
        ([], "required: script"),
        (["none.py"], "the script 'none.py' cannot be read: No such file"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_the_script_runs(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("print('it runs')")
    status, printed, log = ended("-m", "memonger", "run", *arguments, folder=tmp_path)
    assert (status, printed) == (2, "")
    (line,) = log.splitlines()
    assert line.startswith("memonger") and re.search(said, line)
