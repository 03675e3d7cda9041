"""``memonger run``: a script runs as under Python, and what it trains is planned."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from planned import ROOT, run_python, start_python


def ended(*arguments: Any, folder: Path, **environment: str) -> tuple[int, str, str]:
    done = run_python("-W", "ignore", *arguments, typed="a line\n", folder=folder, **environment)
    return done.returncode, done.stdout, done.stderr


#: What a script sees of its process; it imports no MXNet.
SEES = """
import atexit, inspect, multiprocessing, pickle, sys, threading, time

class Thing:
    pass

def is_thing(thing):
    return type(thing).__name__, type(thing).__module__ in ("__main__", "__mp_main__")

if __name__ == "__main__":
    print(sys.argv, __file__, __name__, __spec__ and __spec__.name, __package__ or "")
    print([sys.path[0]], sys.stdin.read(), sys.modules["__main__"].Thing is Thing)
    print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing, inspect.getsource(Thing))
    print("mxnet" in sys.modules, inspect.stack()[0].function)
    atexit.register(print, "at the end")
    for way in ("fork", "spawn"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            print(way, pool.apply(is_thing, (Thing(),)))
    threading.Thread(target=lambda: (time.sleep(0.2), print("the thread"))).start()
    sys.exit(7)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_runs_as_under_python(is_module: bool, tmp_path: Path) -> None:
    package = tmp_path / "scripts"
    package.mkdir()
    (package / "sees.py").write_text(SEES)
    script = ["-m", "scripts.sees"] if is_module else [str(package / "sees.py")]
    options = ["--its", "own", "--report", "--", "-m", "x"]
    expected = ended(*script, *options, folder=tmp_path)
    assert expected[0] == 7 and expected[1].endswith("('Thing', True)\nthe thread\nat the end\n")
    run = ["-m", "memonger", "run", "--work", "2"]
    assert ended(*run, *script, *options, folder=tmp_path) == expected


NAMES = """
import mxnet as mx
from memonger.scripts.kept import file_of

print(file_of(mx.sym.MakeLoss(mx.sym.Variable("x") * 2), {"x": (2,)}, {}))
"""


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
import signal, sys
if sys.argv[1] == "interrupted":
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
    sys.stdin.read()
raise KeyError("what fails")
"""


def test_a_script_that_fails_ends_as_under_python(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    for run in ([], ["-m", "memonger", "run"]):
        status, _, log = ended(*run, script, "by itself", folder=tmp_path)
        assert status == 1 and log.endswith("KeyError: 'what fails'\n")
        process = start_python("-W", "ignore", *run, script, "interrupted", folder=tmp_path)
        assert process.stdout and process.stdout.readline() == "True\n"
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT and log.endswith("KeyboardInterrupt\n")


TRAINS = """
import os, sys
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
    assert "softmax on cpu(0), data (32, 3, 8, 8), softmax_label (32,): 1.6 MB -> " in first
    assert "planned in" in first and last.startswith("memonger: 1 planned, the largest 1.6 MB -> ")
    for file in ("symbol.json", "0001.params", "0001.states"):
        names = (tmp_path / f"{which}-{file}" for which in ("plain", "planned"))
        assert len({name.read_bytes() for name in names}) == 1
    assert (tmp_path / "page.html").stat().st_size > 10**6


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
    assert re.search(r"\w; --or-plain trains it without a plan$", log.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "6 gallons", "script.py"], "budget='6 gallons': unknown unit"),
        (["--work", "0.5", "script.py"], "work=0.5 is less than one forward pass"),
        (["--report", "no/folder/page.html", "script.py"], "there is no folder"),
        (["--hew", "marks", "script.py"], "unrecognized arguments|required"),
        ([], "required: script"),
        (["none.py"], "the script 'none.py' cannot be read: No such file"),
        (["-m", "none.such"], "there is no module 'none.such' to run"),
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
