"""MXNet's dist kvstore on this machine: a scheduler, a server and workers, as processes."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

from planned import CALL, ROOT, call_of

SECONDS = 150
# MXNet's processes wait for one that is gone without end; so the kernel ends each in time, too.
START = f"import signal; signal.alarm({SECONDS})\nimport memonger, mxnet"
SERVING = {"scheduler": START, "server": START}  # they serve within the import, and end there


def on_workers(work: Callable[..., Any], *given: Any, workers: int = 2) -> list[Any]:
    """What a function returns in each worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(workers),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = {**SERVING, **{f"worker {k}": START + CALL for k in range(workers)}}
        for k in range(workers):
            (folder / f"worker {k}").write_bytes(call_of(work, *given))
        processes = []
        try:
            for role, code in codes.items():
                with (folder / f"{role}.log").open("wb") as log:
                    command = [sys.executable, "-W", "ignore", "-c", code, str(folder / role)]
                    of_role = {**common, "DMLC_ROLE": role.split()[0]}
                    processes.append(
                        subprocess.Popen(command, env=of_role, cwd=ROOT, stdout=log, stderr=log)
                    )
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                ends = [process.poll() for process in processes]
                if None not in ends or any(ends):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = {role: (folder / f"{role}.log").read_text()[-1000:] for role in codes}
        assert not any(process.returncode for process in processes), said
        return [pickle.loads((folder / f"worker {k}").read_bytes()) for k in range(workers)]
