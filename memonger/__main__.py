"""``python -m memonger``, and the script ``memonger``: the process of the command.

A KeyboardInterrupt that passes through ``exec``, with which MXNet makes its operators, is noted by
Python, and a process of ``python -m`` then ends by the signal whatever its status is. So the
process ends without Python's shutdown, which a second Ctrl-C would turn into a traceback. Only
while Python starts, and for the few milliseconds in which it imports the package itself, Ctrl-C is
Python's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from memonger.support.interrupts import end, end_at_interrupts


def run() -> None:
    """Carry out the command, and end the process."""
    end_at_interrupts()
    from memonger.cli import main

    status: Any
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, BrokenPipeError):  # nobody reads
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
