"""Start the scheduler, servers and workers of an MXNet job on this machine.

MXNet's own launcher (``tools/launch.py`` with dmlc-tracker) fails on Python 3.9 and later.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, List, Sequence


def free_port() -> int:
    """Find a port that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def run(command: Sequence[str], workers: int, servers: int, patience: float) -> List[int]:
    """Run a command in every role; return the exit statuses, that of the scheduler first.

    Where a process fails, the others have ``patience`` seconds to end. None is left behind.
    """
    job = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NUM_WORKER": str(workers),
        "STARTED_BY": str(os.getpid()),  # they end where this process is gone
    }
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    roles = ["scheduler"] + ["server"] * servers + ["worker"] * workers
    processes: List[Any] = []
    try:
        for role in roles:
            env = {**job, "DMLC_ROLE": role}  # in sessions of their own: Ctrl-C is for us
            processes.append(subprocess.Popen(command, env=env, start_new_session=True))
        end = float("inf")
        while None in [process.poll() for process in processes] and time.monotonic() < end:
            if end == float("inf") and any(process.returncode for process in processes):
                end = time.monotonic() + patience
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
    if any(codes):
        for role, process in zip(roles, processes):
            print(f"{role} {process.pid} ended with {process.returncode}", file=sys.stderr)
    return codes
