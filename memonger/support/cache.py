"""What is kept: in this process (the latest plans), and in the user's cache folder."""

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

log = logging.getLogger("memonger")
T = TypeVar("T")

_caches: weakref.WeakSet[Latest[Any]] = weakref.WeakSet()
_unwritten: dict[Path, dict[str, Any]] = {}


class Latest(Generic[T]):
    """The values that were used last, by key, at most ``most``; threads may share it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: dict[Hashable, T] = {}  # the last that was used is the last
        self._lock = threading.Lock()
        _caches.add(self)

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key, or None."""
        with self._lock:
            if key in self._values:
                self._values[key] = self._values.pop(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: T) -> None:
        """Keep a value, and drop the one that was longest of no use."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > self.most:
                del self._values[next(iter(self._values))]

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; make and keep it where there is none."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value


def forget() -> None:
    """Clear every `Latest`; facts about MXNet and the device, which do not change, stay."""
    for cache in list(_caches):
        cache._values.clear()


def folder() -> Path:
    """Return the folder on disk: ``MEMONGER_CACHE``, or ``memonger`` in the user's cache folder."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("MEMONGER_CACHE") or Path(user) / "memonger")


@contextlib.contextmanager
def on_disk(what: str, about: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Open what is kept on disk as a dict; what the block adds to it is written.

    ``what`` begins the file's name. ``about`` is what the values depend on: others have a file of
    their own. Where none can be written, this process keeps the values.
    """
    digest = hashlib.sha256(json.dumps(list(about.values())).encode()).hexdigest()[:16]
    path = folder() / f"{what}-{digest}.json"
    try:
        kept = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        kept = _unwritten.get(path, dict(about))
    before = json.dumps(kept)
    try:
        yield kept
    finally:
        if json.dumps(kept) != before:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write(path, json.dumps(kept).encode())
            except (OSError, MemongerError) as error:
                _unwritten[path] = kept
                log.info("measurements cannot be stored in %s: %s", path.parent, error)
