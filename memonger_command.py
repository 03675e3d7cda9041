"""The script ``memonger``: it imports the package beside this file, whatever PYTHONPATH says.

A folder of ``PYTHONPATH`` may have a ``memonger.py``: a clone of the original has one.
"""

# PYTHON_ARGCOMPLETE_OK  (read by argcomplete, which completes words in a shell)

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def run() -> None:
    """Carry out the command, and end the process."""
    spec = PathFinder.find_spec("memonger", [os.path.dirname(os.path.abspath(__file__))])
    assert spec is not None and spec.loader is not None
    sys.modules["memonger"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    from memonger.__main__ import run as run_command

    run_command()
