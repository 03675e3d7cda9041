"""Defer signals that arrive while a Python handler could not raise."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Callable, Iterator


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer the handlers of all signals, also of Ctrl-C (SIGINT), to the end of the block.

    Python runs a handler on the main thread before the next line, even in a callback of a C
    library. A callback cannot raise: ctypes prints the KeyboardInterrupt, and the callback ends
    before its work is done.
    """
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in sorted(signal.valid_signals()):
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.enter_context(_deferred(number, handler))
        yield


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
