"""Return memory that the C library has freed to the system."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Iterator


@contextlib.contextmanager
def trim_heap() -> Iterator[None]:
    """Return freed memory to the system at the end of the block, where the C library is glibc.

    By itself glibc returns only the end of its heap. A bind of MXNet takes small blocks, 10 KB a
    node, and later blocks that stay alive keep them from being returned.
    """
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
