"""The C library's allocator: what it has kept is given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Iterator


@contextlib.contextmanager
def giving_back() -> Iterator[None]:
    """Give freed memory back to the system in the end, where the C library is glibc.

    By itself it gives back what is free at the end of its heap alone. To bind a network MXNet takes
    10 KB for each node, in small blocks, and some of those behind them stay.
    """
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
