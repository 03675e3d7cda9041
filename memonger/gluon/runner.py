"""Run a plan that is bound to a block's own arrays, for inputs of some shapes on one device.

The executor of the plan reads ``Parameter.data()`` and the running statistics, and writes gradients
into the arrays of autograd's tape. A `Stub` represents the executor on the tape.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Callable, MutableMapping

import numpy as np

from memonger.gluon import autograd, tape
from memonger.gluon.bound import BoundMarks, BoundSchedule, PlannedGraph, wanted_by
from memonger.gluon.tape import STALE, HeadGradients, RecordedCall
from memonger.schedules.execution.arena import Frame, address
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.signals import deferred_signals
from memonger.support.types import NDArray
from memonger.support.variables import ADD, WRITE, note_computed

if TYPE_CHECKING:
    from memonger.gluon.bound import Arrays, Bound, Marks

#: Bound plans to be freed, with the threads that bound them and must free them.
_deferred: list[tuple[threading.Thread, Bound]] = []


def _defer_free(thread: threading.Thread, bound: Bound) -> None:
    """Keep a bound plan until the thread that bound it frees it, if this is another thread."""
    # MXNet frees an executor by operators that write all variables of its operators, parameters too
    # (``GraphExecutor::~GraphExecutor``, ``ThreadedEngine::DeleteOperator``). The engine appends an
    # operator to the queues of its variables one by one, without a lock over all of them
    # (``ThreadedEngine::Push``). If another thread pushes operators with the same variables at that
    # moment, a deadlock is possible.
    if thread is not threading.current_thread():
        _deferred.append((thread, bound))


def free_unused() -> None:
    """Free executors that this thread bound and that autograd no longer needs."""
    tape.release()
    here = threading.current_thread()
    for entry in list(_deferred):
        if entry[0] is here or not entry[0].is_alive():
            with contextlib.suppress(ValueError):  # another thread has removed it
                _deferred.remove(entry)


class Runner:
    """A bound plan; of a plan that is not split, one call is alive at a time."""

    def __init__(
        self, graph: PlannedGraph, arrays: Arrays, marks: Marks, lent: Bound | None, is_split: bool
    ) -> None:
        self.graph, self._marks, self.is_split = graph, marks, is_split
        self._wanted = wanted_by(marks)
        self._trained: list[NDArray] = []  # parameters
        self.ctx = arrays[graph.names[0]].context
        self.size = sum(arrays[name].size for name in graph.inputs)  # elements of the inputs
        for name in self._wanted:
            array = None
            if name in graph.parameters:
                self._trained.append(arrays[name])
                array = arrays[name].grad
            if array is not None and array.stype != "default" and marks[name].request != WRITE:
                raise MemongerError(
                    f"the gradient of {name!r} is added to an array that is stored as "
                    f"{array.stype}, which a plan cannot do; mark it with a dense array"
                )
        self.bound: Bound
        if graph.is_scheduled:
            lent_arena = lent if isinstance(lent, BoundSchedule) else None
            self.bound = BoundSchedule(graph, arrays, marks, lent_arena, is_split)
        else:
            lent_pool = lent if isinstance(lent, BoundMarks) else None
            self.bound = BoundMarks(graph, arrays, marks, lent_pool)
        # The finalizer holds the plan, so that Python's gc does not free it with this object.
        weakref.finalize(self, _defer_free, threading.current_thread(), self.bound)
        adds = [marks[name].request == ADD for name in self._wanted]
        outputs = len(self.bound.outputs)
        self._stub = tape.Stub(self.ctx, adds, outputs, self._on_gradient, graph.is_np)
        self._np_shape = mx.util.is_np_shape()  # the thread of the backward pass may differ
        #: The calls that the tape has, by number; without a split, the latest alone is valid.
        self.calls: MutableMapping[int, RecordedCall] = weakref.WeakValueDictionary()
        self._head_gradients: Callable[[], HeadGradients | None] = lambda: None
        self._begin()

    def head_gradients(self) -> HeadGradients:
        """Return the arrays of the gradients of outputs, which live as long as calls do."""
        gradients = self._head_gradients()
        if gradients is None:
            # On the CPU the system gives them memory only when the first gradient is written.
            gradients = HeadGradients(
                mx.nd.empty(tensor.shape, self.ctx, tensor.dtype) for tensor in self.bound.outputs
            )
            self._head_gradients = weakref.ref(gradients)
        return gradients

    def _begin(self) -> None:
        """Drop the gradients of a backward pass that did not end."""
        self._gradients: dict[str, NDArray] = {}  # the tape's arrays of gradients, by name
        self._heads: dict[int, NDArray] = {}  # the gradients of the outputs

    @deferred_signals()  # an exception in the stub's hook would be lost, and the call with it
    def forward(self, arrays: Arrays, marks: Marks) -> tuple[list[NDArray], RecordedCall]:
        """Record a call, run its forward pass, and return the outputs as new arrays."""
        number = next(k for k in itertools.count() if k not in self.calls) if self.is_split else 0
        passed = {k: arrays[n].as_nd_ndarray() for k, n in self.graph.passed.items()}
        with mx.autograd.pause(train_mode=True):
            inputs, frame = self.bound.hold(arrays, marks), Frame({})
            call = self.calls[number] = RecordedCall(
                self, self.calls, number, self.head_gradients(), inputs, frame, passed
            )
        with autograd.one_at_a_time():  # a backward pass of another call may be under way
            self._begin()
        others = [arrays[name] for name in self._wanted]
        lease = tape.make_lease(self.ctx, call)
        outputs = self._stub(others, lease, call.results, call.last)
        for k, array in passed.items():  # they share memory, as with a CachedOp
            shared = array.detach()
            mx.nd.identity(outputs[k].as_nd_ndarray(), out=shared)
            outputs[k] = shared.as_np_ndarray() if self.graph.is_np else shared
        with mx.autograd.pause(train_mode=True):
            results = [output.detach().as_nd_ndarray() for output in outputs]
            self.bound.forward(inputs, frame, results)
        for output in outputs:
            note_computed(output)
        return outputs, call

    def _on_gradient(self, kind: str, number: int, array: NDArray) -> None:
        """Note a gradient in the backward pass; after the last one, run the plan's pass.

        MXNet calls this function, so it cannot raise. If it fails, gradients become NaN, and the
        function that began the pass raises the error (`autograd`).
        """
        try:
            if kind == "head":
                self._heads[number] = array
            elif kind == "other":
                self._gradients[self._wanted[number]] = array
            else:
                training = mx.autograd.is_training()
                with mx.util.np_shape(self._np_shape or None), mx.autograd.pause(training):
                    self._finish(array)
                self._begin()
        except BaseException as error:  # KeyboardInterrupt too
            autograd.backward_pass.errors.append(error)
            for gradient in self._gradients.values():
                gradient[:] = np.nan
            self._begin()

    def _finish(self, last: NDArray) -> None:
        """Run the backward pass of a call."""
        call, backward = self.calls.get(last.size - 1), autograd.backward_pass
        is_same = call is not None and (backward.is_partial or address(last) == call.address)
        if call is None or call.frame is None or not is_same:
            raise MemongerError(STALE)
        if not mx.autograd.is_training():
            raise MemongerError(
                "a planned block that was called in training mode has no gradients for "
                "backward(train_mode=False), which MXNet leaves undefined; leave train_mode out"
            )
        if call.spent:
            if self.graph.draws:
                raise MemongerError(
                    "a planned block that draws random numbers (Dropout) can run one backward pass "
                    "for each call; for more, train it without a plan: memonger.gluon.unplan(net)"
                )
            # The outputs on the tape stay as they are.
            unread = [mx.nd.zeros_like(array) for array in call.results]
            self.bound.forward(call.inputs, call.frame, unread)
        heads = [self._heads[k] for k in range(len(call.results))]
        frame = call.frame
        self.bound.backward(frame, heads, self._gradients, self._marks, backward.is_partial)
        if frame.digest:
            backward.unchecked.append((frame.digest, frame.digest_again, self._trained))
        call.spent = True  # last, because another thread may use the memory from here on
        if not backward.retains:
            call.drop()
