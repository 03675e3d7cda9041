"""Does memonger do on your GPU what it promises? One command, one table, one verdict.

    python examples/gpu_check.py                              # everything, in six minutes
    python examples/gpu_check.py bits:resnet50 memory         # some checks
    python examples/gpu_check.py --device cpu:0 --small --minutes 30    # the same code on a CPU

Networks are trained as they are and as planned, from the same values. The checks, the most
important first: whether MXNet computes here; bits (outputs, gradients and running statistics);
memory, predicted and measured; times of a step; Gluon, and ``memonger run``. Each runs in a process
of its own, so that one that fails does not stop the others. The rows are also in table.tsv of the
output folder, and what MXNet logs in its log.txt. The exit status is 0 if all passed, 1 if
something failed, and 2 if nothing could be checked, for want of a GPU.

``prepare`` makes the plans beforehand, also on a machine without a GPU; give --plans both times.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple

CHILD = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"
OTHERS = "mobilenet_v2", "unet", "lstm", "transformer", "inception_v3", "densenet121", "vgg16"
#: In the order in which they are run; and the most seconds of each, more with more --minutes.
CHECKS: Dict[str, int] = {
    "build": 60,
    "bits:resnet50": 60,
    "memory:resnet50": 60,
    "time:resnet50": 60,
    "gluon": 40,
    "run": 60,
    **{f"bits:{name}": 45 for name in OTHERS[:4]},
    "largest:resnet50": 60,
    "front": 30,
    **{f"bits:{name}": 45 for name in OTHERS[4:]},
    "time:resnet50:32": 30,
    "time:resnet50:128": 45,
}
PREPARED = {f"prepare:{name}": 60 for name in ("resnet50", *OTHERS)}
USUAL = 6  # minutes
MINIMUM = 10  # seconds in which a check can show something
# Cards repeat results by these; the times are those of a user's own settings.
REPEATABLE = {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "0", "MXNET_ENFORCE_DETERMINISM": "1"}


def show(folder: Path, verdict: str, check: str, what: str, found: str) -> None:
    """Print a row, and keep it."""
    print(f"{verdict:4}  {what}: {found}", flush=True)
    with open(folder / "table.tsv", "a") as table:
        table.write("\t".join((verdict, check, what, found)) + "\n")


def run(check: str, seconds: float, options: argparse.Namespace) -> Tuple[int, str]:
    """Run a check, and show its rows as they come; return its exit status, and what it said."""
    command = [sys.executable, "-W", "ignore", str(CHILD), check, "--plans", str(options.plans)]
    command += ["--device", options.device, *["--small"] * options.small]
    command += ["--sheet", options.sheet] if options.sheet else []
    env = dict(os.environ, **({} if check.startswith(("time", "front")) else REPEATABLE))
    if options.device.startswith("cpu"):
        env["OMP_NUM_THREADS"] = "1"  # MXNet on the CPU is not repeatable with more
    with open(options.out / "log.txt", "a+") as log:
        print(f"== {check}", file=log, flush=True)
        begin = log.tell()
        child = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        # With the processes that it has started.
        timer = threading.Timer(seconds, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        status = 0
        assert child.stdout is not None
        for line in child.stdout:
            cells = line.rstrip("\n").split("\t")
            if len(cells) == 3:
                show(options.out, cells[0], check, *cells[1:])
                status |= cells[0] == "FAIL"
        ended = child.wait()
        in_time = timer.is_alive()
        timer.cancel()
        log.seek(begin)
        said = [line.strip() for line in log if line.strip()] or ["it said nothing"]
    if not in_time:
        return 1, f"not done after {seconds:.0f} s"
    if ended < 0:
        return 1, f"{signal.Signals(-ended).name}: {said[-1]}"
    return ended or status, said[-1] if ended else ""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checks", nargs="*", help="of these: prepare, " + ", ".join(CHECKS) + " (default: all)")
    add("--device", default="gpu:0", help="gpu:N or cpu:0 (gpu:0)")
    add("--small", action="store_true", help="small networks, to try the command")
    add("--minutes", type=float, default=USUAL, help="after which no check goes on (6)")
    add("--out", type=Path, default=Path("gpu-check"), metavar="FOLDER", help="(gpu-check)")
    add("--plans", type=Path, metavar="FOLDER", help="keep plans there, and take them from there")
    add("--sheet", metavar="GPU", help="predict times for this GPU, such as H100")
    options = parser.parse_args(arguments)
    known = {**CHECKS, **PREPARED}
    chosen = [] if options.checks else list(CHECKS)
    for asked in options.checks:
        found = [check for check in known if f"{check}:".startswith(f"{asked}:")]
        if not any(check.split(":")[0] == asked.split(":")[0] for check in known):
            parser.error(f"no check {asked}; there are prepare, {', '.join(CHECKS)}")
        chosen += found or [asked]  # of another network or batch
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        options.plans = options.plans or Path(folder)
        return run_all(chosen, known, options)


def run_all(chosen: Sequence[str], limits: Dict[str, int], options: argparse.Namespace) -> int:
    """Run checks, each for so many seconds at most; return the exit status."""
    (options.out / "table.tsv").unlink(missing_ok=True)
    end, failed = time.monotonic() + 60 * options.minutes, 0
    for check in chosen:
        left = end - time.monotonic()
        if left < MINIMUM:
            show(options.out, "SKIP", check, check, "no time is left; --minutes gives more")
            continue
        limit = limits.get(check, 60) * max(1, options.minutes / USUAL)
        status, said = run(check, min(limit, left), options)
        if status == 2 and check == "build":
            print(said, file=sys.stderr)
            return 2
        if said:
            show(options.out, "FAIL", check, check, said)
        failed += status != 0
    print(f"FAIL: {failed} checks failed" if failed else "PASS: no check failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
