"""The executor of a network with marks, for a script that knows nothing of marks."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Callable, cast

from memonger.gluon.bound import order_state_readers
from memonger.graph import marks
from memonger.graph.forward import INSERTED, RECORD
from memonger.schedules.execution.plain import PlainNetwork
from memonger.support.mxnet import mx
from memonger.support.symbols import read
from memonger.support.types import Executor, NDArray, Symbol

if TYPE_CHECKING:
    from memonger.schedules.execution.executor import OutGrads

#: How MXNet names the copy of a node that it runs again (``nnvm/src/pass/gradient.cc``).
_AGAIN = re.compile(r"(.+)_mirror(_.+)")


class MarkedExecutor(mx.executor.Executor):
    """MXNet's executor, which reports the network's own nodes alone.

    Gradients of an inference are computed by the plain network.
    """

    _own: set[str]  # the names of these nodes
    _added: tuple[str, ...]  # with which the names of other nodes' outputs begin
    _plain: PlainNetwork
    _gammas: list[NDArray]  # that a forward pass without marks sets to 1

    def forward(self, is_train: bool = False, **kwargs: NDArray) -> list[NDArray]:
        """Compute the outputs; parameters as those of ``mx.executor.Executor.forward``."""
        if not self._plain.forward(self, bool(is_train), **kwargs):
            super().forward(is_train, **kwargs)
            for gamma in self._gammas:
                gamma[:] = 1
        outputs: list[NDArray] = self.outputs
        return outputs

    def backward(self, out_grads: OutGrads = None, is_train: bool = True) -> None:
        """Run the backward pass; later readers of statistics wait until they have moved.

        A recomputed operator moves them in the backward pass, and MXNet's engine does not know it.
        """
        if self._plain.is_latest:
            self._plain.backward(self, out_grads, is_train)
        else:
            super().backward(out_grads, is_train)
        order_state_readers(self.aux_arrays)

    def reshape(self, *args: object, **kwargs: object) -> MarkedExecutor:
        """Make an executor for other shapes."""
        return marked(super().reshape(*args, **kwargs), self._symbol, self._plain.another())

    def set_monitor_callback(
        self, callback: Callable[[bytes, object], object], monitor_all: bool = False
    ) -> None:
        """Install a callback that is called for what it would be called for without marks."""
        own, added = self._own, self._added

        def report(name: bytes, array: ctypes.c_void_p) -> None:
            unmarked = _unmarked_name(mx.base.py_str(name), own, added)
            if unmarked is not None:
                callback(unmarked.encode(), array)
            else:
                mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle))  # which frees it

        super().set_monitor_callback(report, monitor_all)
        self._plain.set_monitor(callback, monitor_all)


def marked(executor: Executor, symbol: Symbol, plain: PlainNetwork) -> MarkedExecutor:
    """Make a MarkedExecutor of MXNet's executor of a symbol with marks; ``plain`` has none."""
    nodes = read(symbol)["nodes"]
    added = [n["name"] for n in nodes if n.get("attrs", {}).get(RECORD) == INSERTED]
    executor.__class__ = MarkedExecutor
    executor._own = {n["name"] for n in nodes} - {*added}
    executor._added = tuple(f"{name}_" for name in added)
    executor._plain = plain
    executor._gammas = [executor.arg_dict[name] for name in marks.list_fixed_gammas(symbol)]
    return cast(MarkedExecutor, executor)


def _unmarked_name(name: str, own: set[str], added: tuple[str, ...]) -> str | None:
    """Return the name of a result without marks; None if there is no such result then."""
    again = _AGAIN.fullmatch(name)
    if again is not None and again[1] in own:
        return again[1] + again[2] if again[2].startswith("_backward_") else None
    return None if name.startswith(added) else name
