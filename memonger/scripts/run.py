"""``memonger run``: a script, or a module, that trains by plans and knows nothing of it.

It runs in this process as Python would run it: in a new ``__main__``, with its own arguments and
import path. MXNet is imported when the script imports it, so that what it sets before holds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Callable, Sequence

import memonger
from memonger.solve.options import read_options
from memonger.support import files
from memonger.support.errors import BudgetError, MemongerError
from memonger.support.mxnet import when_imported
from memonger.support.types import Keywords


def prepare(
    script: str, arguments: Sequence[str], is_module: bool, keywords: Keywords
) -> Callable[[], None]:
    """Make the function that runs a script; ``keywords`` are those of ``memonger.enable``.

    The function raises SystemExit if a network does not fit the budget.

    Raises
    ------
    MemongerError
        If there is no such script, or if an option is wrong.
    """
    check_options(keywords)
    main, code = (_module if is_module else _file)(script)

    def run() -> None:
        sys.argv = [str(main.__file__) if is_module else script, *arguments]
        sys.modules["__main__"] = main
        when_imported(lambda: memonger.enable(**keywords))
        try:
            exec(code, vars(main))
        except BudgetError as error:
            said = str(error).rstrip(".")
            raise SystemExit(f"memonger: {said}; --or-plain trains it without a plan") from None
        finally:
            if "memonger.scripts.session" in sys.modules:
                memonger.disable()

    return run


def check_options(keywords: Keywords) -> None:
    """Check the options, as far as that needs no MXNet."""
    needs_mxnet = keywords.get("optimizer") is not None or keywords.get("budget") == "device"
    unchecked = {"report", "check", "or_plain", "cache", "keep", "recompute"}
    unchecked |= {"budget", "budget_of", "optimizer"} if needs_mxnet else set()
    options = {k: v for k, v in keywords.items() if v is not None and k not in unchecked}
    read_options(**options)
    if keywords.get("report") is not None:
        if importlib.util.find_spec("plotly") is None:
            raise MemongerError("--report needs plotly: pip install 'memonger[report]'")
        files.check_writable(keywords["report"])


def _file(script: str) -> tuple[types.ModuleType, types.CodeType]:
    """Return the module in which a file runs, and its code."""
    main = types.ModuleType("__main__")
    try:
        source = Path(script).read_bytes()
    except OSError as error:
        raise MemongerError(f"the script {script!r} cannot be read: {error.strerror}") from None
    main.__file__, main.__spec__ = os.path.abspath(script), None
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    return main, compile(source, script, "exec", dont_inherit=True)


def _module(name: str) -> tuple[types.ModuleType, types.CodeType]:
    """Return the module in which ``python -m NAME`` runs, and its code."""
    sys.path[0] = os.getcwd()
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
    get_code = getattr(spec and spec.loader, "get_code", None)  # some loaders have none
    code = get_code(spec.name) if spec and get_code else None
    if spec is None or code is None:
        raise MemongerError(f"there is no module {name!r} to run")
    main = importlib.util.module_from_spec(spec)
    main.__name__ = "__main__"
    return main, code


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise MemongerError(f"there is no module {name!r} to run: {error}") from None
