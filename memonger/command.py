"""The process of the command: what Ctrl-C does at any moment, and how it ends.

A KeyboardInterrupt while Python imports, which takes seconds, can be lost in a callback of a
library. One that passes through ``exec``, with which MXNet makes its operators, is noted by Python,
and a process of ``python -m`` then ends by the signal whatever its status is. So until a search
begins Ctrl-C ends the process at once, and in the end the process ends without Python's shutdown,
which a second Ctrl-C would turn into a traceback. Only while Python starts, and for the few
milliseconds in which it imports the package itself, Ctrl-C is Python's.
"""

import contextlib
import os
import signal
import sys
from typing import Any

MISTAKE = 2
INTERRUPTED = "interrupted before anything was found"


def run() -> None:
    """Carry out the command, and end the process."""
    # Not where it is ignored, as a shell has its background jobs do.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from memonger.cli import main

    status: Any
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        _end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, BrokenPipeError):  # nobody reads
            stream.flush()
    os._exit(status)


def raise_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, for a search that then tells what it has found."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"memonger: %s\n" % INTERRUPTED.encode())
    os._exit(MISTAKE)
