"""Caches: of the latest plans, in this process, and of measurements, in the user's folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Callable, Generic, Hashable, Iterator, Mapping, TypeVar

from memonger.support import files
from memonger.support.errors import MemongerError
from memonger.support.types import Json

log = logging.getLogger("memonger")
T = TypeVar("T")

_caches: weakref.WeakSet[Latest[Any]] = weakref.WeakSet()  # type: ignore[misc]  # of any values
_unwritten: dict[Path, Json] = {}


class Latest(Generic[T]):
    """The ``size`` values that were used last, by key; threads may share it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: dict[Hashable, T] = {}  # in the order of their last use
        self._lock = threading.Lock()
        _caches.add(self)

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key, or None."""
        with self._lock:
            if key in self._values:
                self._values[key] = self._values.pop(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: T) -> None:
        """Keep a value, and drop the one whose last use is longest ago."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > self.size:
                del self._values[next(iter(self._values))]

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; if there is none, make and keep it."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value


def forget() -> None:
    """Clear every `Latest`. Facts about MXNet and the device stay: they do not change."""
    for cache in list(_caches):
        cache._values.clear()


def folder() -> Path:
    """Return the cache folder: ``MEMONGER_CACHE``, or ``memonger`` in the user's."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("MEMONGER_CACHE") or Path(user) / "memonger")


@contextlib.contextmanager
def on_disk(stem: str, conditions: Mapping[str, str]) -> Iterator[Json]:
    """Open a file of the cache as a dict, and write it if the block changes it.

    ``stem`` begins the file's name. The values depend on the ``conditions``: there is a file for
    each set of them. If the file cannot be written, this process keeps the values.
    """
    digest = hashlib.sha256(json.dumps(list(conditions.values())).encode()).hexdigest()[:16]
    path = folder() / f"{stem}-{digest}.json"
    try:
        values = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        values = _unwritten.get(path, dict(conditions))
    before = json.dumps(values)
    try:
        yield values
    finally:
        if json.dumps(values) != before:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write(path, json.dumps(values).encode())
            except (OSError, MemongerError) as error:
                _unwritten[path] = values
                log.info("measurements cannot be stored in %s: %s", path.parent, error)
