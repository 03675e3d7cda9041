"""Backward passes through planned blocks: their errors are raised, and ``autograd.grad`` works.

No exception can pass through MXNet from within a backward pass. So the functions of its C API that
begin one are replaced, once. Ours call MXNet's, and then raise the errors of the pass. For the
gradients of a few variables they also differentiate what the calls of planned blocks have put on
the tape.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Iterator

from memonger.gluon import stub
from memonger.gluon.stub import LIB
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.signals import signals_put_off

_Handle = mx.base.NDArrayHandle


class _Pass(threading.local):
    """The backward pass that runs on a thread."""

    errors: list[BaseException] = []  # raised when the pass ends
    partial = False  # whether the pass makes the gradients of a few variables only


_pass = _Pass()


def fail(error: BaseException) -> None:
    """Keep an error of the backward pass on this thread, to be raised when the pass ends."""
    _pass.errors.append(error)


def is_partial() -> bool:
    """Tell whether the backward pass on this thread makes the gradients of a few variables."""
    return _pass.partial


@contextlib.contextmanager
def _watched(partial: bool = False) -> Iterator[None]:
    """Raise the errors of a backward pass when it has ended."""
    outer = _pass.errors, _pass.partial
    errors: list[BaseException] = []
    _pass.errors, _pass.partial = errors, partial
    try:
        with signals_put_off():
            yield
    finally:
        _pass.errors, _pass.partial = outer
    if errors:
        raise errors[0]


def _calls_below(heads: Any) -> list[Any]:
    """Return the calls of planned blocks that arrays, given by handles, were computed from."""
    calls = {stub.symbol_of(call.last.handle).name: call for call in stub.release()}
    symbols = [stub.symbol_of(_Handle(head)) for head in heads] if calls else []
    if any(symbol is None for symbol in symbols):  # MXNet complains of these
        return []
    names = {name for symbol in symbols for name in symbol.list_inputs()}
    return [call for name, call in calls.items() if name in names]


def _watch(usual: Callable[..., int]) -> Callable[..., int]:
    """Make what stands in the place of ``MXAutogradBackward``."""

    def backward(*arguments: Any) -> int:
        with _watched():
            return usual(*arguments)

    return backward


def _watch_any(usual: Callable[..., int]) -> Callable[..., int]:
    """Make what stands in the place of ``MXAutogradBackwardEx``.

    It also makes the gradients of a few variables.
    """

    def backward(
        count: int, heads: Any, head_grads: Any, wanted: int, variables: Any, *others: Any
    ) -> int:
        _, create_graph, _, gradients, _ = others
        calls = _calls_below(heads) if wanted else []
        if calls and create_graph.value:
            raise MemongerError(
                "autograd.grad with create_graph=True needs second derivatives, which a planned "
                "block does not have; train it without a plan: memonger.gluon.unplan(net)"
            )
        for call in calls:
            call.check()
        hidden = dict.fromkeys(array.handle.value for call in calls for array in call.variables)
        if hidden:
            handles = [_Handle(handle) for handle in (*variables, *hidden)]
            variables = mx.base.c_array(_Handle, handles)
        with _watched(partial=bool(calls)):
            status = usual(count, heads, head_grads, wanted + len(hidden), variables, *others)
            if status == 0:  # the caller knows nothing of the hidden variables' gradients
                for k in range(wanted, wanted + len(hidden)):
                    LIB.MXNDArrayFree(_Handle(gradients._obj[k]))
        return status

    return backward


@functools.lru_cache(None)
def install() -> None:
    """Replace the functions of MXNet that begin a backward pass; once for a process."""
    LIB.MXAutogradBackward = _watch(LIB.MXAutogradBackward)
    LIB.MXAutogradBackwardEx = _watch_any(LIB.MXAutogradBackwardEx)
