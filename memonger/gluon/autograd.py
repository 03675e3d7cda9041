"""``mx.autograd`` with planned blocks: their errors are raised, and ``grad`` knows of them.

No exception can pass through MXNet from within a backward pass. So ``autograd.backward``,
``autograd.grad`` and ``NDArray.backward`` are replaced, once, by functions that do what MXNet's do
and then raise what was noted. ``grad`` differentiates what the calls of planned blocks have put on
the tape besides. Who calls MXNet past these functions gets NaN where something fails, and the error
at the next call of a planned block.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Iterator

from memonger.gluon import stub
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx


class _Pass(threading.local):
    """The backward pass that runs on a thread."""

    errors: list[BaseException] | None = None  # that are raised when it ends; None: nobody would
    partial = False  # whether it makes the gradients of a few variables


_pass = _Pass()
_unraised: list[BaseException] = []  # errors that have had nobody to raise them


def fail(error: BaseException) -> None:
    """Note an error in a backward pass."""
    (_unraised if _pass.errors is None else _pass.errors).append(error)


def raise_what_is_left() -> None:
    """Raise the error of a backward pass that could not raise it."""
    if _unraised:
        error = _unraised[0]
        _unraised.clear()
        raise error


def is_watched() -> bool:
    """Tell whether the backward pass on this thread was begun by a function of this module."""
    return _pass.errors is not None


def is_partial() -> bool:
    """Tell whether the backward pass on this thread makes the gradients of a few variables."""
    return _pass.partial


@contextlib.contextmanager
def _watched(partial: bool = False) -> Iterator[None]:
    outer = _pass.errors, _pass.partial
    errors: list[BaseException] = []
    _pass.errors, _pass.partial = errors, partial
    try:
        yield
    finally:
        _pass.errors, _pass.partial = outer
    if errors:
        raise errors[0]


def _calls_below(heads: Any) -> list[Any]:
    """Find the calls of planned blocks that arrays were computed from."""
    heads = [heads] if isinstance(heads, mx.nd.NDArray) else heads
    calls = {mx.autograd.get_symbol(call.last).name: call for call in stub.release()}
    if not calls or not all(map(stub.on_tape, heads)):  # of the latter MXNet complains
        return []
    read = {name for head in heads for name in mx.autograd.get_symbol(head).list_inputs()}
    return [call for name, call in calls.items() if name in read]


def _watch(usual: Any) -> Any:
    @functools.wraps(usual)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _watched():
            return usual(*args, **kwargs)

    return watched


def _grad_of(usual: Any) -> Any:
    @functools.wraps(usual)
    def grad(
        heads: Any,
        variables: Any,
        head_grads: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        train_mode: bool = True,
    ) -> Any:
        about = head_grads, retain_graph, create_graph, train_mode
        calls = _calls_below(heads)
        if not calls:
            return usual(heads, variables, *about)
        if create_graph:
            raise MemongerError(
                "autograd.grad with create_graph=True needs second derivatives, which a planned "
                "block does not have; train it without a plan: memonger.gluon.unplan(net)"
            )
        for call in calls:
            call.check()
        wanted = [variables] if isinstance(variables, mx.nd.NDArray) else list(variables)
        hidden = [variable for call in calls for variable in call.variables]
        unique = list({id(variable): variable for variable in hidden}.values())
        with _watched(partial=True):
            found = usual(heads, [*wanted, *unique], *about)
        return found[: len(wanted)]  # a list for one variable too, as MXNet gives

    return grad


@functools.lru_cache(None)
def install() -> None:
    """Replace the functions of MXNet that begin a backward pass; once for a process."""
    mx.autograd.backward = _watch(mx.autograd.backward)
    mx.nd.NDArray.backward = _watch(mx.nd.NDArray.backward)
    mx.autograd.grad = _grad_of(mx.autograd.grad)
