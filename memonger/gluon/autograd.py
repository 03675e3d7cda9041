"""Raise the errors of backward passes through planned blocks, and support ``autograd.grad``.

An exception within a backward pass cannot pass through MXNet. So this module replaces the functions
of its C API that begin a backward pass: the replacements call MXNet's function, and then raise the
errors of the pass. For the gradients of a few variables (``autograd.grad``) they also differentiate
the variables that calls of planned blocks have put on the tape.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator

import numpy as np

from memonger.gluon import tape
from memonger.schedules.execution.unchanged import check_unchanged
from memonger.support.errors import MemongerError
from memonger.support.mxnet import may_wait, mx
from memonger.support.signals import deferred_signals
from memonger.support.types import NDArray
from memonger.support.variables import LIB, symbol_of

if TYPE_CHECKING:
    from _ctypes import CFuncPtr

    Digests = Dict[str, NDArray]  # by the name of an argument

_Handle = mx.base.NDArrayHandle


class _Pass(threading.local):
    """The backward pass that a thread runs."""

    errors: list[BaseException] = []  # to be raised when the pass ends
    #: Of each call: digests in its forward pass and in this one (`unchanged`), and its parameters.
    unchecked: list[tuple[Digests, Digests, list[NDArray]]] = []
    is_partial = False  # whether the pass computes the gradients of a few variables only
    retains = False  # whether the graph is retained for another pass


backward_pass = _Pass()
_LOCK = threading.RLock()


def one_at_a_time() -> contextlib.AbstractContextManager[object]:
    """Return a block that one thread at a time is in: calls of a block note gradients in one place.

    A thread of a Custom operator does not wait, because the one in the block may wait for it.
    """
    return _LOCK if may_wait() else contextlib.nullcontext()


@contextlib.contextmanager
def _watched(retains: object, is_partial: bool = False) -> Iterator[None]:
    """Collect the errors of a backward pass in the block, and raise the first at its end.

    Before, the calls are dropped that are no longer on the tape, with the arrays that they hold.
    Digests are compared last: to wait for them earlier would hold those arrays for longer.
    """
    outer = dict(vars(backward_pass))
    errors: list[BaseException] = []
    unchecked: list[tuple[Digests, Digests, list[NDArray]]] = []
    backward_pass.errors, backward_pass.unchecked = errors, unchecked
    backward_pass.is_partial = is_partial
    backward_pass.retains = bool(getattr(retains, "value", retains))
    try:
        with one_at_a_time(), deferred_signals():
            yield
            tape.release()
    finally:
        vars(backward_pass).clear()
        vars(backward_pass).update(outer)
    for before, after, parameters in unchecked:
        try:
            check_unchanged(before, after)
        except MemongerError as error:
            errors.append(error)
            for parameter in () if is_partial else parameters:
                if parameter.grad.stype == "default":
                    parameter.grad[:] = np.nan
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or the error would keep its frames, and the calls in them, until a gc


def _calls_below(heads: Iterable[object]) -> list[tape.RecordedCall]:
    """Return the calls of planned blocks from which arrays, given by handles, were computed."""
    calls = {symbol_of(call.last.handle).name: call for call in tape.release()}
    symbols = [symbol_of(_Handle(head)) for head in heads] if calls else []
    if any(symbol is None for symbol in symbols):  # MXNet raises for these
        return []
    names = {name for symbol in symbols for name in symbol.list_inputs()}
    return [call for name, call in calls.items() if name in names]


def _backward(usual: CFuncPtr, *arguments: object) -> int:
    """Call ``MXAutogradBackward``."""
    *_, retain_graph = arguments
    with _watched(retain_graph):
        return int(usual(*arguments))


def _backward_of_any(usual: CFuncPtr, *arguments: Any) -> int:  # type: ignore[misc]  # of ctypes
    """Call ``MXAutogradBackwardEx``, which also computes the gradients of a few variables."""
    count, heads, head_grads, wanted, variables, *others = arguments
    retain_graph, create_graph, _, gradients, _ = others
    calls = _calls_below(heads) if wanted else []
    if calls and create_graph.value:
        raise MemongerError(
            "autograd.grad with create_graph=True needs second derivatives, which a planned "
            "block does not have; train the block without a plan: memonger.gluon.unplan(net)"
        )
    for call in calls:
        call.check()
    hidden = dict.fromkeys(array.handle.value for call in calls for array in call.variables)
    if hidden:
        handles = [_Handle(handle) for handle in (*variables, *hidden)]
        variables = mx.base.c_array(_Handle, handles)
    with _watched(retain_graph, is_partial=bool(calls)):
        status = usual(count, heads, head_grads, wanted + len(hidden), variables, *others)
        if status == 0:  # the caller does not expect the gradients of the hidden variables
            for k in range(wanted, wanted + len(hidden)):
                LIB.MXNDArrayFree(_Handle(gradients._obj[k]))
    return int(status)


@functools.lru_cache(None)
def install() -> None:
    """Replace the functions of MXNet that begin a backward pass, once in a process."""
    LIB.MXAutogradBackward = functools.partial(_backward, LIB.MXAutogradBackward)
    LIB.MXAutogradBackwardEx = functools.partial(_backward_of_any, LIB.MXAutogradBackwardEx)
