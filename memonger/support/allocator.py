"""The C library's allocator."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Iterator


@contextlib.contextmanager
def trim_heap() -> Iterator[None]:
    """Return freed memory to the system at the end of the block, where the C library is glibc.

    By itself glibc returns only what is free at the end of its heap. A bind of MXNet takes 10 KB a
    node in small blocks, and some blocks behind them stay.
    """
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
