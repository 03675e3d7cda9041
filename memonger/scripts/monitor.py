"""What a Monitor is told of a network with marks: what it would be told of it without."""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

from memonger.graph.forward import INSERTED, RECORD
from memonger.support.mxnet import mx
from memonger.support.symbols import read

#: How MXNet names the copy of a node that it runs again (``nnvm/src/pass/gradient.cc``).
_AGAIN = re.compile(r"(.+)_mirror(_.+)")


def monitored(executor: Any, symbol: Any) -> Any:
    """Have an executor of a symbol with marks tell a callback of the network's own nodes alone."""
    nodes = read(symbol)["nodes"]
    added = [n["name"] for n in nodes if n.get("attrs", {}).get(RECORD) == INSERTED]
    own = {n["name"] for n in nodes} - {*added}
    executor.set_monitor_callback = functools.partial(
        _install, executor.set_monitor_callback, own, tuple(f"{name}_" for name in added)
    )
    return executor


def _install(
    usual: Any, own: set[str], added: tuple[str, ...], callback: Any, monitor_all: bool = False
) -> None:
    def tell(name: bytes, array: Any) -> None:
        seen = _seen(mx.base.py_str(name), own, added)
        if seen is not None:
            callback(seen.encode(), array)
        else:
            mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle))  # which frees it

    usual(tell, monitor_all)


def _seen(name: str, own: set[str], added: tuple[str, ...]) -> str | None:
    """Return under which name a result is told without marks; None where there is none."""
    again = _AGAIN.fullmatch(name)
    if again is not None and again[1] in own:
        is_gradient = again[2].startswith("_backward_")
        return again[1] + again[2] if is_gradient else None
    return None if name.startswith(added) else name
