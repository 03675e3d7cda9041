"""The example of many workers: whole jobs on loopback, and what they do where a process dies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
from distributed.jobs import free_port
from planned import ROOT, python_path

pytestmark = pytest.mark.slow
BY_HAND = pytest.mark.exhaustive

SMALL = ("--blocks", "3", "--filters", "8", "--epochs", "1")
HEARTBEAT = 6  # seconds of silence after which a process is taken for dead, where one is to die
WATCHDOG = 100
# The scheduler sees the death after so many seconds, the others that of the scheduler; and a
# little time for processes that share two cores with other tests.
STOPPED_AFTER = 2 * HEARTBEAT + 12


class Job:
    """A process of the example, and what it and those that it has started print."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "examples/train_distributed.py", *SMALL, *options],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                "PS_HEARTBEAT_TIMEOUT": str(HEARTBEAT),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.watchdog = threading.Timer(WATCHDOG, self.process.terminate)
        self.watchdog.start()
        self.printed = ""

    def lines(self) -> Iterator[str]:
        """Return what is printed, as it comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            yield line

    def line(self, pattern: str) -> Any:
        """Return the first match in what is printed from now on."""
        matches = (re.search(pattern, line) for line in self.lines())
        match = next((candidate for candidate in matches if candidate), None)
        assert match, self.printed
        return match

    def end(self) -> int:
        """Wait for the end; the exit status."""
        for _ in self.lines():
            pass
        self.watchdog.cancel()
        return self.process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()  # it ends all that it has started
        self.end()


def train(*options: str) -> str:
    """Run a job that succeeds, however long a process is silent; what it prints."""
    with Job(*options, PS_HEARTBEAT_TIMEOUT=str(WATCHDOG)) as job:
        assert job.end() == 0, job.printed
    return job.printed


def parameters(printed: str, workers: int) -> str:
    """Return the digest of the parameters that all workers end with."""
    digests = re.findall(r"worker (\d): parameters (\w{64})", printed)
    assert sorted(rank for rank, _ in digests) == [str(k) for k in range(workers)], printed
    (digest,) = {digest for _, digest in digests}
    return digest


@pytest.mark.parametrize(
    ("api", "kvstore"),
    [("gluon", "dist_sync"), pytest.param("module", "dist_device_sync", marks=BY_HAND)],
)
def test_four_workers_and_two_servers_train_to_the_same_bits_by_any_plan(
    api: str, kvstore: str
) -> None:
    """Equal bits with and without a plan.

    All have the same batches. Otherwise MXNet itself is not repeatable: a server adds up what four
    workers send as it comes.
    """
    job = ("--local", "4", "--servers", "2", "--same-data", "--api", api, "--kvstore", kvstore)
    printed = {how: train(*job, "--how", how) for how in ("none", "marks", "schedule")}
    assert len({parameters(output, 4) for output in printed.values()}) == 1
    assert "recomputed" not in printed["none"]
    for how in ("marks", "schedule"):
        (recomputed,) = re.findall(r"^recomputed (\d+) of", printed[how], re.M)
        assert int(recomputed) > 5
    assert "as often as the schedule says" in printed["schedule"]


def checkpoint(folder: Path, epoch: int) -> str:
    """Return the digest of the parameters of a checkpoint, as the example prints it."""
    digest = hashlib.sha256()
    for _, array in sorted(mx.nd.load(str(folder / f"epoch-{epoch}" / "net.params")).items()):
        digest.update(array.asnumpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("api", "how"), [pytest.param("gluon", "marks", marks=BY_HAND), ("module", "schedule")]
)
def test_after_a_workers_death_all_stop_and_the_job_resumes_to_the_same_bits(
    api: str, how: str, tmp_path: Path
) -> None:
    """The others stop in time with a message; the job goes on to the same bits as without.

    What Adam does depends on the number of updates; so this must be in the checkpoint.
    """
    options = ("--local", "2", "--api", api, "--how", how, "--epochs", "3")
    whole = train(*options, "--checkpoints", str(tmp_path / "whole"))

    folder = tmp_path / "crash"
    with Job(*options, "--checkpoints", str(folder)) as job:
        victim = job.line(r"worker 1, process (\d+): epoch 1")
        os.kill(int(victim.group(1)), signal.SIGKILL)
        killed = time.monotonic()
        job.line(r"scheduler \d+ stops: 1 worker\(s\) not heard of for \d+ s; .*--resume")
        job.line(r"(worker|server) \d+ stops: 1 scheduler\(s\) not heard of for")
        assert job.end() == 75, job.printed
    assert time.monotonic() - killed < STOPPED_AFTER, job.printed
    assert re.search(r"worker \d+ stops: 1 scheduler\(s\) not heard of", job.printed)
    assert len(re.findall(r" stops: ", job.printed)) == 3  # the scheduler, the server, a worker
    assert "parameters" not in job.printed

    resumed = train(*options, "--checkpoints", str(folder), "--resume")
    assert "epoch 0" not in resumed and "epoch 2" in resumed
    assert parameters(resumed, 2) == parameters(whole, 2)
    assert checkpoint(folder, 3) == checkpoint(tmp_path / "whole", 3) == parameters(whole, 2)


def gone(process: int) -> bool:
    """Tell whether there is no such process, or only its exit status."""
    try:
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True


def all_gone(processes: list[int]) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end and not all(map(gone, processes)):
        time.sleep(0.1)
    return all(map(gone, processes))


@pytest.mark.parametrize("by", [pytest.param(signal.SIGINT, marks=BY_HAND), signal.SIGKILL])
def test_no_process_is_left_behind(by: signal.Signals) -> None:
    with Job("--local", "2", "--epochs", "1000") as job:
        job.line(r"worker 0, process \d+: epoch 1")
        main = job.process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        started = [int(child) for child in children]
        assert len(started) == 4
        try:
            job.process.send_signal(by)
            code = {signal.SIGINT: 130, signal.SIGKILL: -9}[by]
            assert job.process.wait(20) == code and all_gone(started)
        finally:
            for child in started:
                if not gone(child):
                    os.kill(child, signal.SIGKILL)


def why_it_stops(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    """Return what a worker prints that fails by itself, started as on a cluster."""
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    roles = [("scheduler", one), ("server", one), ("worker", one), ("worker", other)]
    processes = [Job(*options, DMLC_ROLE=role, **job) for role, options in roles]
    try:
        codes = [process.end() for process in processes]
    finally:
        for process in processes:
            process.process.kill()
    assert sorted(codes) == [1, 75, 75, 75]
    return processes[codes.index(1)].printed


def test_workers_with_different_plans_are_refused() -> None:
    said = why_it_stops(("--how", "marks"), ("--how", "schedule"))
    assert re.search("worker 1 has another plan than worker 0", said), said


# What stands for the commands of a cluster: every process is on this machine. A process that ssh
# starts has the variables of the page and no other.
CLUSTER = {
    "ssh": 'exec env -i "PATH=$PATH" bash -c "$3"',
    "scontrol": "echo 127.0.0.1",
    "sbatch": """export SLURM_NTASKS=$(grep -o 'ntasks=[0-9]*' "$1" | cut -d= -f2)
SLURM_JOB_NODELIST=node exec bash "$1" """,
    "srun": """shift
for k in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$k "$@" & done
wait""",
    "python": f"""export DMLC_NODE_HOST=127.0.0.1 PYTHONPATH={os.pathsep.join(sys.path)}
exec {sys.executable} -W ignore "$@" {" ".join(SMALL)}""",
}


@pytest.mark.parametrize(
    ("command", "workers"), [pytest.param("ssh -tt", 2, marks=BY_HAND), ("sbatch job.sh", 4)]
)
def test_jobs_as_the_page_starts_them(command: str, workers: int, tmp_path: Path) -> None:
    """The commands for ssh and SLURM give every process its role, and one address to all."""
    page = (ROOT / "docs" / "many-machines.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) if command in b]
    block = re.sub(r"10\.0\.0\.\d", "127.0.0.1", block).replace("9091", str(free_port()))
    (tmp_path / "bin").mkdir()
    for name, script in CLUSTER.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "memonger").symlink_to(ROOT)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    started = subprocess.Popen(
        ["bash", "-c", block],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = started.communicate(timeout=WATCHDOG)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    parameters(printed, workers)


def test_a_folder_with_checkpoints_needs_resume(tmp_path: Path) -> None:
    (tmp_path / "epoch-1").mkdir()
    with Job("--local", "1", "--checkpoints", str(tmp_path)) as job:
        assert job.end() == 2
    assert "has checkpoints; give --resume or another folder" in job.printed
