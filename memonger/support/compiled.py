"""Compiled functions (numba), cached on disk so that the next process need not compile them.

numba compiles a function anew when its own file changes, but not when that of a function which it
calls does, or of a tuple that it reads by place: stale code would read and write where nothing is.
So the cache has a folder of its own for every state of all files that hold compiled functions.

A Ctrl-C that comes while compiled code runs becomes a SystemError when its result is handed over
("returned a result with an error set"). One that comes while LLVM compiles is raised in a function
that LLVM calls, which shows it and goes on. Both are made a KeyboardInterrupt again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Callable, TypeVar, cast

import numba
from numba.core.registry import CPUDispatcher

from memonger.support import cache

log = logging.getLogger("memonger")
F = TypeVar("F", bound=Callable[..., object])

_njit: Any = numba.njit  # its type, and the names in the other, differ from one numba to the next
_config: Any = numba.config
_CPUDispatcher: Any = CPUDispatcher


def compiled(function: F) -> F:
    """``numba.njit`` with a cache, without the interpreter's lock."""
    before = _config.CACHE_DIR
    _config.CACHE_DIR = _FOLDER  # read when the decorator is applied
    try:
        made: Any = _njit(cache=True, nogil=True)(function)
    finally:
        _config.CACHE_DIR = before
    if isinstance(made, _CPUDispatcher):  # not with NUMBA_DISABLE_JIT
        made.__class__ = _Interruptible
        made._cache.save_overload = functools.partial(_save, made._cache.save_overload)
    return cast(F, made)


def _save(save: Callable[..., None], *args: Any) -> None:
    """Write what numba has compiled; a full disk does not end it."""
    try:
        save(*args)
    except OSError as error:
        log.info("compiled functions cannot be stored in %s: %s", _FOLDER, error)


class _Interruptible(_CPUDispatcher):
    """A compiled function, with Ctrl-C as Python has it."""

    def compile(self, sig: Any) -> object:
        if threading.current_thread() is not threading.main_thread():  # no other gets any
            return super().compile(sig)
        shown = sys.unraisablehook
        lost: list[Any] = []

        def show(what: Any) -> None:
            (lost.append if what.exc_type is KeyboardInterrupt else shown)(what)

        sys.unraisablehook = show
        try:
            return super().compile(sig)
        finally:
            sys.unraisablehook = shown
            if lost:  # also in place of an error that comes of what was not finished
                raise KeyboardInterrupt from None

    def __call__(self, *args: Any) -> object:
        global _new
        if _new and (sys.stderr is None or not sys.stderr.isatty()):  # nobody sees a progress bar
            log.warning("compiling the search; this takes a minute, once after an installation")
        _new = False
        try:
            return super().__call__(*args)
        except SystemError as error:
            cause: Any = error.__cause__
            while isinstance(cause, SystemError):  # one for each call that it passed through
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def _folder() -> str:
    """Find a folder for this state of the source that can be written: beside it, or the user's."""
    package = Path(__file__).parents[1]
    sources = [source.read_bytes() for source in sorted(package.rglob("*.py"))]
    compiled = b"".join(source for source in sources if b"@compiled" in source)
    name = "memonger-" + hashlib.sha256(compiled).hexdigest()[:16]
    places = _config.CACHE_DIR, package / "__pycache__", cache.folder(), tempfile.gettempdir()
    for place in map(str, filter(None, places)):
        folder = os.path.join(place, name)
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return str(_config.CACHE_DIR)


_FOLDER = _folder()
_new = not any(Path(_FOLDER).rglob("*.nbi"))  # numba's indices of what is compiled
