"""Caches within a process (least recently used out first), and the user's cache folder."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any, Generic, Hashable, TypeVar

T = TypeVar("T")

_caches: weakref.WeakSet[Latest[Any]] = weakref.WeakSet()  # type: ignore[misc]  # of any values


class Latest(Generic[T]):
    """A cache of the ``size`` most recently used values, by key; threads may share it."""

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
        """Store a value, and drop the least recently used one if there are too many."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > self.size:
                del self._values[next(iter(self._values))]


def forget() -> None:
    """Clear every `Latest`. Facts about MXNet and the device are not in one: they do not change."""
    for cache in list(_caches):
        cache._values.clear()


def folder() -> Path | None:
    """Return ``MEMONGER_CACHE`` if it is set, otherwise ``memonger`` in the user's cache folder.

    It is None for a user without a home, as some containers have.
    """
    if os.environ.get("MEMONGER_CACHE"):
        return Path(os.environ["MEMONGER_CACHE"])
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if user.startswith("~") else Path(user) / "memonger"
