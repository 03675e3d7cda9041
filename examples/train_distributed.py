"""Train one network by several workers, which all recompute by the same plan.

The workers add up their gradients with MXNet's distributed kvstore. Without ``--local`` this is one
process of a job, and the DMLC_* variables say which; ``--local 2`` starts a whole job on this
machine. Every worker plans by itself; after the first step they make sure that all have the same
plan. Where a process of the job dies, the others stop with a message (exit status 75). Start the
job again with ``--resume``, and it ends with the same bits as if nothing had happened.
"""

import os

# Read by MXNet when it is loaded. On the CPU it is not repeatable with more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PS_HEARTBEAT_INTERVAL", "1")  # seconds; without it no death is seen
os.environ.setdefault("PS_HEARTBEAT_TIMEOUT", "20")
# In a scheduler or server, ``import mxnet`` does not return. Without its role it does (`serve`).
ROLE = os.environ.pop("DMLC_ROLE", "")

import argparse
import hashlib
import sys
import traceback
from typing import Any, Iterator, Optional, Sequence, Tuple

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from distributed import checkpoints, jobs
from distributed.loops import LOOPS, PLANS
from train_digits import TRAINING_IMAGES, digits


def same_plan(store: Any, key: Any, plan: Any) -> None:
    """Make sure that this worker has the plan of worker 0; the digest goes over the kvstore."""
    operations = [] if plan.schedule is None else plan.schedule.operations.tolist()
    digest = hashlib.sha256(f"{plan.symbol.tojson()}{operations}".encode()).digest()
    mine = mx.nd.array(list(digest))
    first = mx.nd.zeros_like(mine)
    store.broadcast(key, mine, out=first)
    if (mine != first).asnumpy().any():
        raise SystemExit(
            f"worker {store.rank} has another plan than worker 0. Give all workers the same "
            "options, and the same versions of memonger and MXNet, on the same kind of device"
        )


def batches(options: argparse.Namespace, store: Any, epoch: int) -> Iterator[Tuple[Any, Any]]:
    """Yield this worker's part of an epoch; its order follows from the epoch alone."""
    part = 0 if options.same_data else store.rank
    images, labels = digits()
    order = np.random.RandomState(epoch).permutation(TRAINING_IMAGES)[part :: store.num_workers]
    for k in range(TRAINING_IMAGES // store.num_workers // options.batch):
        chosen = order[k * options.batch : (k + 1) * options.batch]
        yield images[chosen], labels[chosen]


def average(store: Any, key: Any, loop: Any, new: bool) -> None:
    """Give all workers the mean of their running statistics; their weights are equal already."""
    mx.nd.waitall()
    states = loop.states()
    names = sorted(name for name in states if "running" in name)
    flat = mx.nd.array(np.concatenate([states[name].asnumpy() for name in names]))
    if new:
        store.init(key, mx.nd.zeros_like(flat))
    store.pushpull(key, flat, out=flat)
    for name in names:
        size = states[name].size
        states[name], flat = flat[:size] / store.num_workers, flat[size:]
    loop.set_states(states)


def train(options: argparse.Namespace, store: Any) -> None:
    """Train as one of the workers."""
    names = ("digest", "epochs", "statistics")
    # Module's keys are strings, a Trainer's are numbers; MXNet fails from 215,000 on.
    digest, epochs, statistics = names if options.api == "module" else range(100_000, 100_003)
    loop, folder = LOOPS[options.api](options, store), options.checkpoints
    first = checkpoints.first_epoch(folder, store, epochs)
    if first:
        checkpoints.load_weights(folder, loop, first)
    loop.start()
    if first:
        checkpoints.load_optimizer(folder, loop, first)
    for epoch in range(first, options.epochs):
        print(f"worker {store.rank}, process {os.getpid()}: epoch {epoch}", flush=True)
        # MXNet tells nobody the state of its random numbers; so it is set anew in each epoch.
        mx.random.seed(1 + epoch * store.num_workers + (0 if options.same_data else store.rank))
        for k, (x, y) in enumerate(batches(options, store, epoch)):
            loop.step(*(mx.nd.array(each, ctx=options.ctx) for each in (x, y)))
            if k == 0 and epoch == first and loop.plan is not None:
                same_plan(store, digest, loop.plan)
        average(store, statistics, loop, epoch == first)
        if folder:
            checkpoints.save(folder, loop, epoch + 1)
    report(store, loop)


def report(store: Any, loop: Any) -> None:
    """Print the plan, a digest of the parameters, and the accuracy."""
    mx.nd.waitall()
    if loop.plan is not None and store.rank == 0:
        print(loop.plan)
    found = hashlib.sha256()
    for _, array in sorted(loop.states().items()):
        found.update(array.asnumpy().tobytes())
    images, labels = (each[TRAINING_IMAGES:] for each in digits())
    accuracy = (loop.scores(images).argmax(axis=1) == labels).mean()
    text = f"parameters {found.hexdigest()}, accuracy {accuracy:.4f}"
    print(f"worker {store.rank}: {text}", flush=True)


def serve(options: argparse.Namespace) -> None:
    """Do what this process is for, to the end of the job."""
    os.environ["DMLC_ROLE"] = ROLE
    # Of a worker this returns when all processes of the job are there.
    store = mx.kv.create(options.kvstore)
    with jobs.watched(store, ROLE):
        try:
            if ROLE == "worker":
                train(options, store)
                store._barrier()
            else:
                mx.kvstore.kvstore_server.KVStoreServer(store).run()
        except BaseException as error:
            if isinstance(error, SystemExit):
                print(error, file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
            os._exit(1)  # an exit by Python would wait for the others


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the example; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--api", choices=tuple(LOOPS), default="gluon")
    add("--kvstore", choices=("dist_sync", "dist_device_sync"), default="dist_sync")
    add("--how", choices=(*PLANS, "none"), default="marks", help="how to plan")
    for name, default, what in (
        ("--blocks", 8, "residual blocks"),
        ("--filters", 16, "filters of every convolution"),
        ("--batch", 50, "images in a worker's batch"),
        ("--epochs", 4, "times that all images are shown"),
        ("--local", 0, "start a job on this machine, with so many workers"),
        ("--servers", 1, "servers that --local starts"),
        ("--gpu", None, "the GPU of this worker (default: the CPU)"),
    ):
        add(name, type=int, default=default, metavar="N", help=what)
    add("--checkpoints", default="", metavar="FOLDER", help="write one after each epoch")
    add("--resume", action="store_true", help="go on from the latest checkpoint, if any")
    add("--same-data", action="store_true", help="the same batches for all, to compare bits")
    options = parser.parse_args(given)
    if options.checkpoints and checkpoints.saved(options.checkpoints) and not options.resume:
        parser.error(f"{options.checkpoints} has checkpoints; give --resume or another folder")
    options.shape = (options.batch, 1, 8, 8)
    options.ctx = mx.cpu() if options.gpu is None else mx.gpu(options.gpu)
    if ROLE:
        serve(options)
        return 0
    if not options.local:
        parser.error("start a job with --local N, or set DMLC_ROLE and the other DMLC_ variables")
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), *given]
    patience = 2 * int(os.environ["PS_HEARTBEAT_TIMEOUT"]) + 10  # until all have stopped
    try:
        codes = jobs.run(command, options.local, options.servers, patience)
    except KeyboardInterrupt:
        return 130
    return jobs.STOPPED if jobs.STOPPED in codes else int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
