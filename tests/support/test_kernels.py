"""Compiled code: how Python calls it, and what is said when it cannot."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import memonger.planners.marks.search  # for its structs, and those of all that it imports
import memonger.planners.trees.search  # noqa: F401
from memonger.planners.annealing import Archive, empty_archive
from memonger.support.errors import MemongerError
from memonger.support.kernels import Struct, compiled, constant

from planned import ROOT, run_code, run_python

pytestmark = pytest.mark.python_differs

KEY = np.array([1, 0, 1], dtype=np.int32)
REFUSED = {
    "key must be an array of int32, not int64": lambda: compiled.group_by_key(
        KEY.astype(np.int64), 2
    ),
    "key must be an array of int32, not 3": lambda: compiled.group_by_key(3, 2),
    "key must be C-contiguous": lambda: compiled.group_by_key(KEY[::2], 2),
    "float": lambda: compiled.group_by_key(KEY, 2.5),
    r"group_by_key takes \['key', 'keys'\]": lambda: compiled.group_by_key(KEY),
    "archive must be a Archive, not tuple": lambda: compiled.record((KEY, KEY), 1, 1.0, KEY),
    "Archive has the fields": lambda: Archive(KEY, KEY),
    "pools must be an array of int64, not int32": lambda: Archive(1, KEY, np.zeros(3), KEY),
}


#: Type in C -> its annotation in Python; other types have the same name.
ANNOTATIONS = {"int64_t": "int", "double": "float", "Bytes": "AnyArray"}


@pytest.mark.parametrize("kind", Struct.classes)
def test_the_fields_of_a_struct_are_those_of_its_header(kind: str) -> None:
    """They are annotated in the order in which compiled code finds them."""
    struct = Struct.classes[kind]
    of_header = [(name, ANNOTATIONS.get(of, of)) for name, of in struct.fields.items()]
    assert list(struct.__annotations__.items()) == of_header


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_are_what_the_header_says(message: str) -> None:
    assert [array.tolist() for array in compiled.group_by_key(KEY, 2)] == [[0, 1, 3], [1, 0, 2]]
    with pytest.raises(TypeError, match=message):
        REFUSED[message]()


def test_what_no_header_declares_is_told() -> None:
    """As in a clone with a header that is newer than the library."""
    with pytest.raises(AttributeError, match="the library has no absent among its functions; "):
        getattr(compiled, "absent")  # noqa: B009
    with pytest.raises(AttributeError, match="the library has no ABSENT among its constants; "):
        constant("ABSENT")
    with pytest.raises(AttributeError, match="the library has no Absent among its structs; "):
        type("Absent", (Struct,), {})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_compiled_code_writes_to_the_arrays_of_a_copied_struct(copied: Any) -> None:
    archive = empty_archive(8, 2, (3,), np.int32)
    other = copied(archive)
    with pytest.raises(AttributeError):
        other.pools = archive.pools
    compiled.record(other, 1, 1.0, KEY)
    compiled.record(other.replace(states=np.zeros(2, np.int32)), 8, 1.0, KEY[:1])
    assert other.pools.tolist() == [1, 8] and other.states.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert archive.pools.tolist() == [0, 0]


def test_memory_is_given_back() -> None:
    """Nothing of 200 calls that take 8 MB each is left."""
    key = np.zeros(2**21, dtype=np.int32)
    compiled.group_by_key(key, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        compiled.group_by_key(key, 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_no_memory_is_an_error() -> None:
    """What was taken before is given back, and the next call works."""
    printed = run_code("""
import resource
import numpy as np
from memonger.support.kernels import Struct, compiled

key, limits = np.array([1, 0, 1], dtype=np.int32), resource.getrlimit(resource.RLIMIT_AS)
compiled.group_by_key(key, 2)
size = 1024 * int(open("/proc/self/status").read().split("VmSize:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_AS, (size + 3 * 2**26, limits[1]))
for _ in range(20):  # the first 128 MB are there, the next are not
    try:
        compiled.group_by_key(key, 2**25)
    except MemoryError as error:
        print(error)
print([found.tolist() for found in compiled.group_by_key(key, 2)])
""")
    assert printed.splitlines() == 20 * ["group_by_key: out of host memory"] + [
        "[[0, 1, 3], [1, 0, 2]]"
    ]


def test_sizes_that_cannot_be_are_refused() -> None:
    """A product beyond int64, an array beyond int32, and a state longer than the archive's."""
    with pytest.raises(MemoryError, match="group_by_key"):
        compiled.group_by_key(KEY, 2**62)
    with pytest.raises(MemongerError, match=f"key: the network is too large.*{2**31 - 1}"):
        compiled.group_by_key(np.lib.stride_tricks.as_strided(KEY, (2**31,)), 2)
    archive = empty_archive(8, 2, (3,), np.int32)
    compiled.record(archive, 1, 1.0, np.ones(3, dtype=np.int32))
    with pytest.raises(ValueError, match="longer than those of the archive"):
        compiled.record(archive, 1, 0.5, np.ones(4, dtype=np.int32))
    assert archive.states.tolist() == [[1, 1, 1], [0, 0, 0]]


def copied(folder: Path) -> Path:
    """Copy what the library is built from, and the tests, to a folder."""
    for name in ("memonger", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


CALLED = """
import sys
import numpy
from memonger.support.kernels import Struct, compiled
sys.path[:] = sys.argv[1:]
compiled.group_by_key(numpy.zeros(2, "int32"), 1)
"""


def test_the_library_is_that_of_the_sources(tmp_path: Path) -> None:
    """In a tree it is the one beside them, or an installed one; what does not fit is told."""
    script = copied(tmp_path) / "script.py"
    script.write_text(CALLED)
    name = Path("memonger", "support", "libkernels.so")
    beside, installed = tmp_path / name, tmp_path / "installed" / name
    in_path = next(path for path in (Path(folder, name) for folder in sys.path) if path.exists())
    installed.parent.mkdir(parents=True)
    shutil.copy(in_path, installed)
    shutil.copy(in_path, beside)

    def message(*path: str) -> str:
        done = run_python(str(script), *path)
        assert (done.returncode == 0) == (not done.stderr)
        return done.stderr.strip().rpartition("MemongerError: ")[2]

    rebuild = f"run in {tmp_path}: python setup.py build_ext -i"
    assert message() == ""
    beside.unlink()
    assert message() == f"{beside} is missing; {rebuild}"
    assert message(str(tmp_path / "installed")) == ""
    header, code = (tmp_path / "memonger" / "graph" / f"arrays.{end}" for end in "hc")
    text = code.read_text()
    code.write_text(text + "/* newer */")
    other = "was built from another graph/arrays."
    assert message(str(tmp_path / "installed")) == f"{installed} {other}c; {rebuild}"
    code.write_text(text)
    header.write_text(header.read_text() + "enum { NEWER };")
    assert message(str(tmp_path / "installed")) == f"{installed} {other}h; {rebuild}"
    installed.rename(beside)
    assert message() == f"{beside} {other}h; {rebuild}"
    (tmp_path / "setup.py").unlink()
    assert message() == f"{beside} {other}h; install memonger again"
    header.unlink()  # a wheel has no sources
    assert message() == ""
    beside.unlink()
    assert message() == f"{beside} is missing; install memonger again"


@pytest.mark.slow
def test_nothing_is_read_outside_its_array(tmp_path: Path) -> None:
    """The tests of the searches again, with a library that looks at every address."""
    looking = {"CFLAGS": "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "-i"]
    subprocess.run(build, cwd=copied(tmp_path), env={**os.environ, **looking}, check=True)
    library = subprocess.run(
        ["cc", "-print-file-name=libasan.so"], stdout=subprocess.PIPE, text=True, check=True
    )
    names = "test_recursive", "test_search", "test_fastest"
    tests = [f"tests/planners/{name}.py" for name in names]
    preloaded = {"LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env={**os.environ, **preloaded},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
