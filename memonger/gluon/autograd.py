"""Backward passes through planned blocks: their errors are raised, and ``autograd.grad`` works.

No exception can pass through MXNet from within a backward pass. So the functions of its C API that
begin one are replaced, once, by functions that do what MXNet's do and then raise what was noted.
For the gradients of a few variables they also differentiate what the calls of planned blocks have
put on the tape.
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

    errors: list[BaseException] = []  # that are raised when it ends
    partial = False  # whether it makes the gradients of a few variables


_pass = _Pass()


def fail(error: BaseException) -> None:
    """Note an error in a backward pass."""
    _pass.errors.append(error)


def is_partial() -> bool:
    """Tell whether the backward pass on this thread makes the gradients of a few variables."""
    return _pass.partial


@contextlib.contextmanager
def _watched(partial: bool = False) -> Iterator[None]:
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
    """Find the calls of planned blocks that arrays were computed from, by their handles."""
    calls = {stub.symbol_of(call.last.handle).name: call for call in stub.release()}
    symbols = [stub.symbol_of(_Handle(head)) for head in heads] if calls else []
    if any(symbol is None for symbol in symbols):  # of which MXNet complains
        return []
    read = {name for symbol in symbols for name in symbol.list_inputs()}
    return [call for name, call in calls.items() if name in read]


def _watch(usual: Callable[..., int]) -> Callable[..., int]:
    def watched(*args: Any) -> int:
        with _watched():
            return usual(*args)

    return watched


def _watch_any(usual: Callable[..., int]) -> Callable[..., int]:
    """Watch ``MXAutogradBackwardEx``, which also makes the gradients of a few variables."""

    def watched(
        heads: int,
        heads_at: Any,
        head_grads: Any,
        count: int,
        variables: Any,
        retain_graph: Any,
        create_graph: Any,
        train_mode: Any,
        found: Any,
        stypes: Any,
    ) -> int:
        about = retain_graph, create_graph, train_mode, found, stypes
        calls = _calls_below(heads_at) if count else []
        hidden = dict.fromkeys(each.handle.value for call in calls for each in call.variables)
        if calls and create_graph.value:
            raise MemongerError(
                "autograd.grad with create_graph=True needs second derivatives, which a planned "
                "block does not have; train it without a plan: memonger.gluon.unplan(net)"
            )
        for call in calls:
            call.check()
        if hidden:
            variables = mx.base.c_array(_Handle, [_Handle(each) for each in (*variables, *hidden)])
        with _watched(partial=bool(calls)):
            status = usual(heads, heads_at, head_grads, count + len(hidden), variables, *about)
            if status == 0:
                for k in range(count, count + len(hidden)):  # which the caller does not know of
                    LIB.MXNDArrayFree(_Handle(found._obj[k]))
        return status

    return watched


@functools.lru_cache(None)
def install() -> None:
    """Replace the functions of MXNet that begin a backward pass; once for a process."""
    LIB.MXAutogradBackward = _watch(LIB.MXAutogradBackward)
    LIB.MXAutogradBackwardEx = _watch_any(LIB.MXAutogradBackwardEx)
