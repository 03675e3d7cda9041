"""``memonger run``: a script, or a module, that trains by plans and knows nothing of it.

It runs in this process as Python would run it: in a new ``__main__``, with its own arguments and
import path. MXNet is imported when the script imports it, so that what it sets before holds.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import inspect
import os
import pkgutil
import runpy
import sys
import traceback
from importlib.machinery import (
    BuiltinImporter,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from itertools import takewhile
from types import FrameType, ModuleType, TracebackType
from typing import Callable, Iterable, Iterator, Sequence, Tuple, TypeVar

import memonger
from memonger.solve.limits import Limits, check_keywords, read_limits
from memonger.support import files
from memonger.support.errors import BudgetError, MemongerError, is_own
from memonger.support.mxnet import when_imported
from memonger.support.types import Keywords

#: Whether the folder of a script stays out of ``sys.path`` (``python -P``; ``-I`` before 3.11).
_SAFE_PATH = getattr(sys.flags, "safe_path", sys.flags.isolated)
#: Runs a module, a folder or a zip file: the function that Python itself calls (Modules/main.c).
_run_module: Callable[..., object] = runpy._run_module_as_main  # type: ignore[attr-defined, misc]

#: A frame with its line or, from Python 3.11 on, with its lines and columns.
Entry = Tuple[FrameType, object]
OuterEntry = TypeVar("OuterEntry", Tuple[FrameType, int], inspect.FrameInfo)


def prepare(
    script: str, arguments: Sequence[str], is_module: bool, keywords: Keywords, command: str = ""
) -> Callable[[], None]:
    """Make the function that runs a script; ``keywords`` are those of ``memonger.enable``.

    A report shows the ``command`` by which the script was run.

    The function raises SystemExit if a network does not fit the budget.

    Raises
    ------
    MemongerError
        If there is no such script, or if an option is wrong.
    """
    needs_mxnet = "optimizer" in keywords or keywords.get("budget") == "device"
    later = {*OF_SESSION, *(("budget", "budget_of", "optimizer") if needs_mxnet else ())}
    check_options({name: value for name, value in keywords.items() if name not in later})
    if "report" in keywords:
        if importlib.util.find_spec("plotly") is None:
            raise MemongerError(
                "--report needs plotly; in the clone of memonger, pip install '.[report]'"
            )
        files.check_writable(keywords["report"])
        # The script may change the folder.
        keywords = {**keywords, "report": os.path.abspath(keywords["report"])}
    start = (_read_module if is_module else _read_script)(script)

    def run() -> None:
        sys.argv = ["-m" if is_module else script, *arguments]
        sys.modules["__main__"] = main = ModuleType("__main__")
        vars(main).update(__builtins__=builtins, __loader__=BuiltinImporter)
        if sys.version_info < (3, 14):  # later it is made when it is read (PEP 649)
            main.__annotations__ = {}

        def begin() -> None:
            its_own = sys.modules.get("memonger")
            sys.modules["memonger"] = memonger  # while the rest of this package is imported
            try:
                memonger.enable(**keywords).command = command
            finally:
                sys.modules["memonger"] = its_own or memonger
                if its_own is None:
                    _leave_name()

        when_imported(begin)
        _leave_name()
        _hide_frames()
        try:
            start()
        except BudgetError as error:
            said = str(error).rstrip(".")
            raise SystemExit(f"memonger: {said}; --or-plain trains it without a plan") from None
        except SystemExit:  # which is not printed
            raise
        except BaseException as error:
            _hide_callers(error.__traceback__)
            raise
        finally:
            if "memonger.scripts.session" in sys.modules:
                memonger.disable()

    return run


#: Options of `enable` alone.
OF_SESSION = ("report", "check", "or_plain", "cache")


def check_options(keywords: Keywords) -> Limits:
    """Check the options of ``memonger.enable``, as far as that needs no MXNet."""
    check_keywords("enable", keywords, OF_SESSION, has_shapes=False)
    return read_limits(**keywords)


def _read_module(name: str) -> Callable[[], object]:
    """Return the function that runs a module, as ``python -m NAME`` does."""
    _set_path(os.getcwd())
    return functools.partial(_run_module, name)


def _read_script(script: str) -> Callable[[], object]:
    """Return the function that runs a file, a folder, a zip file, or ``-``: standard input."""
    path, is_typed = os.path.join(os.getcwd(), script), script == "-"
    if not is_typed and pkgutil.get_importer(script) is not None:  # of a folder or a zip file
        _set_path(path, is_safe=True)
        return functools.partial(_run_module, "__main__", alter_argv=False)
    try:
        with open(0 if is_typed else script, "rb", closefd=not is_typed) as file:
            content = file.read()
    except OSError as error:
        raise MemongerError(f"the script {script!r} cannot be read: {error.strerror}") from None
    _set_path("" if is_typed else os.path.dirname(os.path.realpath(script)))

    def run() -> None:
        main, is_compiled = vars(sys.modules["__main__"]), script.endswith(".pyc")
        file = "<stdin>" if is_typed else path if sys.version_info >= (3, 9) else script
        main.update(__file__=file, __cached__=None)
        if not is_typed:
            kind = SourcelessFileLoader if is_compiled else SourceFileLoader
            main["__loader__"] = kind("__main__", file)
        if is_compiled:
            code = main["__loader__"].get_code("__main__")
        else:
            code = compile(content, file, "exec", dont_inherit=True)
        exec(code, main)

    return run


def _set_path(first: str, is_safe: bool = False) -> None:
    """Put a folder in the place of the first of ``sys.path``, which is that of the command."""
    if not _SAFE_PATH:
        sys.path[0] = first
    elif is_safe:
        sys.path.insert(0, first)


def _leave_name() -> None:
    """Leave the name ``memonger`` to a module of the script, where Python would find that first."""
    found = PathFinder.find_spec("memonger")
    if found is not None and found.origin != memonger.__file__:
        del sys.modules["memonger"]


def _hide_frames() -> None:
    """Have ``traceback``, ``logging`` and ``inspect`` show a script its call stacks without us.

    Those whose innermost frame is of this package stay whole: they tell of what failed in it.
    """
    usual_stack, usual_frames = traceback.walk_stack, inspect.getouterframes

    def walk_stack(f: FrameType | None) -> Iterator[tuple[FrameType, int]]:
        return iter(_list_outer(usual_stack(f or sys._getframe(1))))

    def getouterframes(frame: FrameType, context: int = 1) -> list[inspect.FrameInfo]:
        return _list_outer(usual_frames(frame, context))

    def hiding(usual: Callable[[TracebackType | None], Iterator[Entry]]) -> object:
        def walk(tb: TracebackType | None) -> Iterator[Entry]:
            entries = [*usual(tb)]  # the innermost last
            if entries and not is_own(entries[-1][0]):
                entries = [entry for entry in entries if not is_own(entry[0])]
            return iter(entries)

        return walk

    traceback.walk_stack, inspect.getouterframes = walk_stack, getouterframes
    for name in ("walk_tb", "_walk_tb_with_full_positions"):  # the second from Python 3.11 on
        if hasattr(traceback, name):
            setattr(traceback, name, hiding(getattr(traceback, name)))


def _list_outer(entries: Iterable[OuterEntry]) -> list[OuterEntry]:
    """List the frames of a call stack, the innermost first, that a script is shown."""
    first, *others = entries
    if is_own(first[0]):
        return [first, *others]
    others = [*takewhile(lambda entry: entry[0].f_globals is not globals(), others)]
    return [first, *(entry for entry in others if not is_own(entry[0]))]


def _hide_callers(trace: TracebackType | None) -> None:
    """Have Python print an exception that ends the script with the frames of the script alone."""
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    usual = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = usual  # or the frames would live until Python has cleared its modules
        told: list[BaseException] = []
        following: list[BaseException | None] = [error.with_traceback(trace)]
        while following:  # an exception, and those that it came from
            one = following.pop()
            if one is not None and not any(one is other for other in told):
                told.append(one)
                one.__traceback__ = _unlink_own(one.__traceback__)
                following += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
        usual(kind, error, error.__traceback__)

    sys.excepthook = show


def _unlink_own(trace: TracebackType | None) -> TracebackType | None:
    """Take the frames of this package out of a traceback, unless the innermost is one of them."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    if entries and not is_own(entries[-1].tb_frame):
        entries = [entry for entry in entries if not is_own(entry.tb_frame)]
        for entry, inner in zip(entries, [*entries[1:], None]):
            entry.tb_next = inner
    return entries[0] if entries else None
