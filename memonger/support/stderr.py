"""One line of MXNet's, kept from standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Iterator

_LOCK = threading.Lock()  # file descriptor 2 is the process's
PATIENCE = 1.0  # seconds to wait for what was written


@contextlib.contextmanager
def without_line(text: bytes) -> Iterator[None]:
    """Keep the lines that hold a text from standard error; all others are handed on at once.

    For what MXNet logs without a condition: it writes to the file descriptor, so only there can it
    be stopped. A process that is forked meanwhile keeps the pipe, which is then handed on until
    that process ends.

    Parameters
    ----------
    text : bytes
    """
    with _LOCK:
        try:
            stderr = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        read, write = os.pipe()
        forwarding = threading.Thread(target=_forward, args=(read, stderr, text), daemon=True)
        forwarding.start()
        os.dup2(write, 2)
        os.close(write)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            forwarding.join(PATIENCE)


def _forward(read: int, stderr: int, text: bytes) -> None:
    """Hand on all lines but those with the text, until nothing can write any more."""
    with open(read, "rb") as lines:
        for line in lines:
            if text not in line:
                with contextlib.suppress(OSError):
                    os.write(stderr, line)
    os.close(stderr)
