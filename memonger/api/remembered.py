"""Fingerprints of everything that a plan depends on."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Sequence

from memonger.api.request import Request
from memonger.support.symbols import read


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
