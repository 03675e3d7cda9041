"""Signals that arrive where a Python handler could not raise."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Callable, Iterator

_SIGNALS = sorted(signal.valid_signals())


@contextlib.contextmanager
def signals_put_off() -> Iterator[None]:
    """Call the handlers of signals that arrive within it at its end; SIGINT's too, Ctrl-C's.

    Python runs handlers on the main thread before it runs the next line, be that in a function
    that a C library calls, to which nothing can be raised: ctypes prints the KeyboardInterrupt,
    and what the function was called for is not done.
    """
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.enter_context(_put_off(number, handler))
        yield


@contextlib.contextmanager
def _put_off(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    arrived: list[Any] = []
    signal.signal(number, lambda *about: arrived.append(about))
    try:
        yield
    finally:
        signal.signal(number, handler)
        for about in arrived:
            handler(*about)
