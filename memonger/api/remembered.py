"""What is remembered in this process, by everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from typing import Any, Generic, Sequence, TypeVar

from memonger.api.request import Request
from memonger.support.symbols import read

T = TypeVar("T")


class Remembered(Generic[T]):
    """The last so many of what was found; safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._found: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> T | None:
        """What is remembered under a key, or None."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def put(self, key: str, value: T) -> None:
        """Remember a value, and forget the one that was longest of no use."""
        with self._lock:
            self._found[key] = value
            while len(self._found) > self.most:
                self._found.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._found.clear()


def structure(symbol: Any) -> dict[str, Any]:
    """The graph of a symbol, in which operators count by their place and not by their name.

    A ``sym_gen`` that leaves naming to MXNet makes the same network under other names each time.
    """
    graph = read(symbol)
    for node in graph["nodes"]:
        if node["op"] != "null":
            del node["name"]
    return graph


def settings() -> dict[str, str]:
    """The environment variables that MXNet reads."""
    return {k: v for k, v in os.environ.items() if k.startswith(("MXNET_", "NNVM_"))}


def fingerprint(request: Request, options: Sequence[object]) -> str:
    """A fingerprint of everything that a plan depends on."""
    asked = [request.spec, request.grad_req, str(request.ctx), request.until]
    text = json.dumps([structure(request.symbol), settings(), asked, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
