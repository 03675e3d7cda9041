"""What Ctrl-C does to the command ``memonger``.

A KeyboardInterrupt while Python imports, which takes seconds, can be lost in a callback of a
library. So until a search begins Ctrl-C ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

MISTAKE = 2
INTERRUPTED = "interrupted before anything was found"


def end_at_interrupts() -> None:
    """Have Ctrl-C end the process, unless it is ignored, as a shell has its background jobs do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def raise_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, for a search that then tells what it has found."""
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(*_: Any) -> None:
    """End the process as one that was interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, b"memonger: %s\n" % INTERRUPTED.encode())
    os._exit(MISTAKE)
