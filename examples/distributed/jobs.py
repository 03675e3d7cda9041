"""Start and watch the scheduler, the servers and the workers of an MXNet job.

MXNet's own launcher (``tools/launch.py`` with dmlc-tracker) fails on Python 3.9 and later.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Iterator, List, Sequence

STOPPED = 75  # the exit status where another process died: try again
GROUPS = {"scheduler": 1, "server": 2, "worker": 4}  # as MXNet numbers them


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


@contextlib.contextmanager
def watched(store: Any, role: str) -> Iterator[None]:
    """Watch the other processes of the job, in a thread."""
    ended = threading.Event()
    thread = threading.Thread(target=_look, args=(role, store.handle, ended), daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()  # before Python frees the store


def _look(role: str, handle: Any, ended: threading.Event) -> None:
    """Stop this process where another one of the job is gone.

    The scheduler hears the heartbeats of all; the others hear only that of the scheduler. So the
    scheduler stops where one is silent, and then all the others do.
    """
    from mxnet.base import _LIB as library

    dead, timeout = ctypes.c_int(), int(os.environ["PS_HEARTBEAT_TIMEOUT"])
    parent = int(os.environ.get("STARTED_BY", 0))  # set by `run`
    while not ended.wait(1):
        for other in ("worker", "server") if role == "scheduler" else ("scheduler",):
            given = (handle, GROUPS[other], ctypes.byref(dead), timeout)
            if library.MXKVStoreGetNumDeadNode(*given) == 0 and dead.value:
                silent = f"{dead.value} {other}(s) not heard of for {timeout} s"
                hint = "start all processes again, with --resume"
                print(f"{role} {os.getpid()} stops: {silent}; {hint}", flush=True)
                os._exit(STOPPED)  # the main thread waits within MXNet
        if parent and os.getppid() != parent:
            os._exit(STOPPED)
