"""Run a module of this package in a child process, which answers in JSON.

A kernel may crash or corrupt the memory of its process, and a script's profile, random numbers and
memory must not change. So what may do that runs in a child. This file is its script too.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # the first path is this package's, the others are the parent's
    MODULE, *sys.path[:] = sys.argv[1:]
    import memonger as memonger  # this one, though the parent's path may have another one first

    del sys.path[0]

import importlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memonger.support.types import Json


def run_child(module: str, job: Json) -> tuple[list[Json] | None, str]:
    """Run ``answer(job)`` of a module in a child process.

    It yields answers, each of which is sent at once. A child has no variables of the cluster
    (``DMLC_*``), and its profile does not overwrite the user's.

    Parameters
    ----------
    module : str
        The whole name of a module of this package.
    job : JSON
        The argument of the function.

    Returns
    -------
    list of JSON or None
        The answers up to the end of the child; None if it did not even import the module.
    str
        How the child ended, with the last line of its errors.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DMLC_")}
    environment.pop("MXNET_PROFILER_AUTOSTART", None)
    script = Path(__file__).resolve()
    paths = [str(script.parents[2]), *sys.path]
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", str(script), module, *paths],
            env=environment,
            input=json.dumps(job),
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
        )
    except OSError as error:  # no Python, or no memory for it
        return None, str(error)
    code, errors = process.returncode, process.stderr.strip().splitlines()
    how = f"exited with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    lines = process.stdout.splitlines()
    answers = [json.loads(line) for line in lines[1:]] if lines else None
    return answers, ": ".join([f"the child process {how}", *errors[-1:]])


def main() -> None:
    """Send the answers of `MODULE`, a line for each, after an empty line that tells of its import.

    What it prints goes to stderr.
    """
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:  # each line is sent at once
        os.dup2(2, 1)
        job, module = json.load(sys.stdin), importlib.import_module(MODULE)
        answers.write("\n")
        for answer in module.answer(job):
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
