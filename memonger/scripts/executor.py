"""The executor of a network with marks, as it is to a script that knows nothing of marks."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from memonger.gluon.runner import touch
from memonger.graph.forward import INSERTED, RECORD
from memonger.support.mxnet import mx
from memonger.support.symbols import read

#: How MXNet names the copy of a node that it runs again (``nnvm/src/pass/gradient.cc``).
_AGAIN = re.compile(r"(.+)_mirror(_.+)")


class MarkedExecutor(mx.executor.Executor):
    """MXNet's executor, which tells of the network's own nodes alone."""

    _own: set[str]  # the names of these nodes
    _added: tuple[str, ...]  # how outputs of other nodes begin

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; what reads statistics afterwards waits until they have moved.

        What runs again has them move later, and MXNet's engine does not know that they do.
        """
        super().backward(*args, **kwargs)
        touch(self.aux_arrays)

    def reshape(self, *args: Any, **kwargs: Any) -> MarkedExecutor:
        """Make an executor for other shapes."""
        return marked(super().reshape(*args, **kwargs), self._symbol)

    def set_monitor_callback(self, callback: Any, monitor_all: bool = False) -> None:
        """Install a callback that is told what it would be told without marks."""
        own, added = self._own, self._added

        def tell(name: bytes, array: Any) -> None:
            seen = _seen(mx.base.py_str(name), own, added)
            if seen is not None:
                callback(seen.encode(), array)
            else:
                mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle))  # which frees it

        super().set_monitor_callback(tell, monitor_all)


def marked(executor: Any, symbol: Any) -> MarkedExecutor:
    """Make a MarkedExecutor of MXNet's executor of a symbol with marks."""
    nodes = read(symbol)["nodes"]
    added = [n["name"] for n in nodes if n.get("attrs", {}).get(RECORD) == INSERTED]
    executor.__class__ = MarkedExecutor
    executor._own = {n["name"] for n in nodes} - {*added}
    executor._added = tuple(f"{name}_" for name in added)
    made: MarkedExecutor = executor
    return made


def _seen(name: str, own: set[str], added: tuple[str, ...]) -> str | None:
    """Return under which name a result is told without marks; None where there is none."""
    again = _AGAIN.fullmatch(name)
    if again is not None and again[1] in own:
        is_gradient = again[2].startswith("_backward_")
        return again[1] + again[2] if is_gradient else None
    return None if name.startswith(added) else name
