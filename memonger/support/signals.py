"""Signals that arrive where a Python handler cannot raise."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Callable, Iterator


@contextlib.contextmanager
def signals_put_off() -> Iterator[None]:
    """Put off the handlers of signals, Ctrl-C's (SIGINT) too, to the end of the block.

    Python runs a handler on the main thread before the next line, even in a function that a C
    library calls. Nothing can be raised there: ctypes prints the KeyboardInterrupt, and the
    function's work is not done.
    """
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in sorted(signal.valid_signals()):
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.enter_context(_put_off(number, handler))
        yield


@contextlib.contextmanager
def _put_off(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    arrivals: list[tuple[int, FrameType | None]] = []
    signal.signal(number, lambda *arguments: arrivals.append(arguments))
    try:
        yield
    finally:
        signal.signal(number, handler)
        for arguments in arrivals:
            handler(*arguments)
