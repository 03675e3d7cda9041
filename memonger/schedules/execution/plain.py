"""Run steps of ``forward(is_train=False)`` and ``backward()`` by the network without its plan.

In such steps MXNet computes the gradients of an inference (adversarial examples, neural style).
Recomputed operators would run in training mode (``GraphExecutor::Backward`` in
``src/executor/graph_executor.cc``), and so give other results.
"""

from __future__ import annotations

from typing import Callable

from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx, without_notices
from memonger.support.types import Executor, NDArray, OutGrads, Symbol

REASON = (
    "backward() after forward(is_train=False) needs all results of that forward pass, so such "
    "steps run without the plan, in additional memory: as much as without a plan"
)


class PlainNetwork:
    """A network without its plan, bound to the arrays of the plan's executor.

    It is bound at the first backward pass after an inference, which runs the inference again. Later
    inferences run only here. ``warn`` is called with the reason when it is bound for that.
    """

    def __init__(self, symbol: Symbol, warn: Callable[[str], None]) -> None:
        self._symbol, self._warn = symbol, warn
        self._bound: Executor | None = None
        self._runs = False  # whether inferences run in the network without its plan
        self._monitor: tuple[object, bool] | None = None
        self.is_latest = False  # whether the latest forward pass was one of inference

    def bound(self, planned: Executor) -> Executor:
        """Return MXNet's executor of the network, bound to the arrays of the plan's executor."""
        if self._bound is None:
            with environment(), without_notices():
                self._bound = mx.sym.Symbol.bind(
                    self._symbol,
                    planned._ctx,
                    planned.arg_arrays,
                    planned.grad_arrays,
                    planned._grad_req,
                    planned.aux_arrays,
                    planned._group2ctx,
                )
        return self._bound

    def forward(self, planned: Executor, is_train: bool, **inputs: NDArray) -> bool:
        """Run a forward pass if it must run without the plan; return whether it did."""
        self.is_latest = not is_train
        if is_train or not self._runs:
            return False
        plain = self.bound(planned)
        plain.forward(is_train=False, **inputs)
        for source, target in zip(plain.outputs, planned.outputs):
            source.copyto(target)
        return True

    def backward(self, planned: Executor, out_grads: OutGrads, is_train: bool) -> None:
        """Run the backward pass after an inference."""
        plain = self.bound(planned)
        if not self._runs:
            self._warn(REASON)
            self._runs = True
            self._run_again(planned)
            if self._monitor is not None:
                plain.set_monitor_callback(*self._monitor)
        plain.backward(out_grads, is_train)

    def _run_again(self, planned: Executor) -> None:
        """Run the inference again that the executor of the plan has run."""
        plain, states = self.bound(planned), planned.aux_arrays
        before = [state.copy() for state in states]
        plain.forward(is_train=False)
        pairs = [*zip(planned.outputs, plain.outputs), *zip(before, states)]
        if not all(_is_same(one, other) for one, other in pairs):
            for old, state in zip(before, states):
                old.copyto(state)
            self.is_latest = False
            raise MemongerError(
                "forward(is_train=False) cannot be repeated for the first backward() after it: it "
                "draws random numbers, it updates auxiliary states, or its inputs or outputs were "
                "changed meanwhile; call forward(is_train=False) again, then backward()"
            )

    def another(self) -> PlainNetwork:
        """Make a PlainNetwork of the same symbol for another executor."""
        return PlainNetwork(self._symbol, self._warn)

    def set_monitor(self, callback: object, monitor_all: bool) -> None:
        """Install the callback of a monitor, also for a later bind."""
        self._monitor = callback, monitor_all
        if self._runs and self._bound is not None:
            self._bound.set_monitor_callback(callback, monitor_all)


def _is_same(one: NDArray, other: NDArray) -> bool:
    return bool(one.asnumpy().tobytes() == other.asnumpy().tobytes())
