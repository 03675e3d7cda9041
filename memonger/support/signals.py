"""Defer signals that arrive while a Python handler could not raise."""

from __future__ import annotations

import _signal  # the functions of ``signal`` without its enums, which take most of the time
import contextlib
import signal
import threading
from types import FrameType
from typing import Callable, Iterator

_NUMBERS = sorted(map(int, signal.valid_signals()))
_is_deferring = False  # whether the main thread is in a block of `deferred_signals`


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer the handlers of all signals, also of Ctrl-C (SIGINT), to the end of the block.

    Python runs a handler on the main thread before the next line, even in a callback of a C
    library. A callback cannot raise: ctypes prints the KeyboardInterrupt, and the callback ends
    before its work is done. Within another such block, they are deferred to the end of that one.
    """
    global _is_deferring
    if _is_deferring or threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as stack:
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler):
                stack.enter_context(_deferred(number, handler))
        _is_deferring = True
        try:
            yield
        finally:
            _is_deferring = False


@contextlib.contextmanager
def _deferred(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    arrivals: list[tuple[int, FrameType | None]] = []
    signal.signal(number, lambda *arguments: arrivals.append(arguments))
    try:
        yield
    finally:
        signal.signal(number, handler)
        for arguments in arrivals:
            handler(*arguments)
