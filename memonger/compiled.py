"""Compiled functions (numba), cached on disk so that the next process need not compile them.

numba keeps what it compiled of a function until the function's own file changes. It does not see
that another file has: that of a function which it calls, or of the tuple that both read by place.
Stale code would then read and write where nothing is. So the cache has a folder of its own for
every state of this package's source.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Callable, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])

_njit: Any = numba.njit  # its type, and the names in the other, differ from one numba to the next
_config: Any = numba.config


def compiled(function: F) -> F:
    """``numba.njit`` with a cache, without the interpreter's lock."""
    before = _config.CACHE_DIR
    _config.CACHE_DIR = _FOLDER  # read when the decorator is applied
    try:
        made: F = _njit(cache=True, nogil=True)(function)
        return made
    finally:
        _config.CACHE_DIR = before


def _folder() -> str:
    """A folder for this state of the source that can be written: beside it, or the user's."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    name = "memonger-" + digest.hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    places = [_config.CACHE_DIR, package / "__pycache__", cache, tempfile.gettempdir()]
    for place in places:
        if place:
            folder = os.path.join(place, name)
            try:
                os.makedirs(folder, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    return folder
            except OSError:
                continue
    return str(_config.CACHE_DIR)


_FOLDER = _folder()
